"""The parts of devcluster that need no Slurm: configuration text, processes, refusals."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slime_hpc.devcluster import DevCluster, Shape, config, daemons, default_dir, files, network, roster, users
from slime_hpc.devcluster.config import Layout
from slime_hpc.devcluster.network import LoopbackNetwork, NamespaceNetwork
from slime_hpc.errors import ClusterError, DeadlineExceeded, UserError
from slime_hpc.spec.cluster import ClusterProfile

ROOT = Path("/d/c")
SHAPE = Shape(train_nodes=1, rollout_nodes=2, gpus_per_node=4, cpus_per_node=8)
NETWORK = NamespaceNetwork("abc123", "198.18.7.0/24", SHAPE.nodes)


def conf_lines(shape: Shape) -> list[str]:
    return config.slurm_conf(Layout(ROOT), shape, NETWORK.hosts).splitlines()


def test_partitions_are_disjoint_and_train_is_the_default() -> None:
    partitions = [line.split()[:3] for line in conf_lines(SHAPE) if line.startswith("PartitionName")]
    assert partitions == [
        ["PartitionName=train", "Nodes=n1", "Default=YES"],
        ["PartitionName=rollout", "Nodes=n2,n3", "Default=NO"],
    ]


def test_each_node_has_its_own_name_and_address() -> None:
    nodes = [line.split()[:4] for line in conf_lines(SHAPE) if line.startswith("NodeName")]
    assert nodes == [
        [f"NodeName=n{i}", f"NodeHostname=n{i}", f"NodeAddr=198.18.7.{10 + i}", "Port=6818"] for i in (1, 2, 3)
    ]


def test_accounting_can_be_left_out() -> None:
    assert "AccountingStorageEnforce=associations,limits,qos" in conf_lines(SHAPE)
    without = replace(SHAPE, accounting=False)
    assert "AccountingStorageType=accounting_storage/none" in conf_lines(without)
    assert not any("slurmdbd" in line for line in conf_lines(without))
    names = [[d.name for d in stage] for stage in roster.stages(Layout(ROOT), without, NETWORK.hosts)]
    assert names == [["munged"], ["slurmctld", "slurmd-n1", "slurmd-n2", "slurmd-n3"]]


def test_no_gpus_means_no_gres() -> None:
    assert not any("gres" in line.lower() or "gpu" in line for line in conf_lines(replace(SHAPE, gpus_per_node=0)))


def test_nodes_resolve_each_other_and_the_controller() -> None:
    assert config.hosts_file(NETWORK.hosts).splitlines()[2:] == [
        "198.18.7.1 ctl",
        "198.18.7.11 n1",
        "198.18.7.12 n2",
        "198.18.7.13 n3",
    ]


@pytest.mark.parametrize("wrong", [{"train_nodes": 0}, {"rollout_nodes": 65}, {"gpus_per_node": -1}])
def test_impossible_shapes_are_refused_by_option_name(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        Shape(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["/tmp/with space", "/tmp/with#hash", "/tmp/100%n"])
def test_paths_that_slurm_cannot_quote_are_refused(root: str) -> None:
    with pytest.raises(UserError, match="cannot quote"):
        config.require_usable_path(Path(root))


def test_paths_too_long_for_a_unix_socket_are_refused() -> None:
    longest = 107 - len("/spool/n128/n128_67108863.4294967291.128")
    config.require_usable_path(Path("/" + "d" * (longest - 1)))
    with pytest.raises(UserError, match="1 bytes too long"):
        config.require_usable_path(Path("/" + "d" * longest))


def test_a_directory_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        files.claim_directory(Layout(tmp_path))
    assert DevCluster(tmp_path).down() is False
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_status_and_env_where_nothing_is_up(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    assert cluster.status().state == "down"
    with pytest.raises(UserError, match=f"slime-hpc devcluster up --dir {tmp_path}"):
        cluster.client_env()
    assert DevCluster(tmp_path / "absent").down() is False


def test_a_damaged_record_is_named_and_can_be_taken_down(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.state.write_text('{"shape": {}}')
    layout.log.mkdir()
    with pytest.raises(ClusterError, match=f"state.json is damaged .* slime-hpc devcluster down --dir {tmp_path}"):
        DevCluster(tmp_path).status()
    assert DevCluster(tmp_path).down() is True
    assert list(tmp_path.iterdir()) == [layout.log]


def test_the_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_dir() == Path("/xdg/slime-hpc/devcluster")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_dir() == Path.home() / ".local/state/slime-hpc/devcluster"


def test_a_missing_binary_is_named_with_the_packages() -> None:
    with pytest.raises(ClusterError, match=r"no-such-daemon; install them, as root: apt-get install slurm-wlm"):
        daemons.require_binaries(("sh", "no-such-daemon"))


@pytest.mark.parametrize(("uid", "wanted", "obstacle"), [(1000, True, "not root"), (0, False, "--no-netns")])
def test_why_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch, uid: int, wanted: bool, obstacle: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert network.obstacle_to_namespaces(wanted) == obstacle


def test_without_namespaces_nodes_differ_by_address_and_port() -> None:
    plan = network.plan_network(ROOT, SHAPE.nodes, "not root")
    assert isinstance(plan, LoopbackNetwork)
    assert "not root" in plan.note
    assert [host.address for host in plan.hosts.nodes.values()] == ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
    ports = {plan.hosts.controller.port, plan.hosts.database_port, *(h.port for h in plan.hosts.nodes.values())}
    assert len(ports) == 5
    assert network.network_from_json(plan.to_json(), SHAPE.nodes) == plan


def test_a_taken_port_moves_the_block() -> None:
    first = network.plan_network(ROOT, SHAPE.nodes, "not root")
    with listener(first.hosts.controller.port):
        second = network.plan_network(ROOT, SHAPE.nodes, "not root")
    assert second.hosts.controller.port != first.hosts.controller.port


def test_no_free_ports_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FIRST_PORT", 32768 - 5)
    with listener(32767), pytest.raises(ClusterError, match="no 5 consecutive free ports from 32763 to 32767; see ss"):
        network.plan_network(ROOT, SHAPE.nodes, "not root")


@contextlib.contextmanager
def listener(port: int) -> Iterator[None]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        yield


def test_a_user_is_who_runs_us_not_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "someone-else")
    monkeypatch.setenv("LOGNAME", "someone-else")
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert f"SlurmUser={me}" in conf_lines(SHAPE)
    monkeypatch.setattr(os, "geteuid", lambda: 4242424)
    with pytest.raises(UserError, match="uid 4242424 has no name on this machine"):
        conf_lines(SHAPE)


def test_root_admits_everybody_and_a_user_only_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert users.submitters()[0] == "root"
    assert "nobody" in users.submitters()
    assert "daemon" not in users.submitters()
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    assert users.submitters() == ["nobody"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[daemons.ProcessRecord]:
    env = {"PATH": daemons.PATH, daemons.MARKER: str(ROOT)}
    record = daemons.start(["sleep", "60"], env=env, log=tmp_path / "log", cwd=tmp_path)
    yield record
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the test has ended it
        os.kill(record.pid, signal.SIGKILL)
        os.waitpid(record.pid, 0)


def test_a_process_is_ours_only_by_start_time_and_marker(sleeper: daemons.ProcessRecord) -> None:
    assert daemons.is_alive(sleeper, ROOT)
    assert not daemons.is_alive(sleeper, Path("/another"))
    assert not daemons.is_alive(replace(sleeper, start_ticks=sleeper.start_ticks - 1), ROOT)


def test_stop_ends_ours_and_spares_a_reused_pid(sleeper: daemons.ProcessRecord) -> None:
    daemons.stop([replace(sleeper, start_ticks=sleeper.start_ticks - 1)], ROOT)
    assert daemons.is_alive(sleeper, ROOT)
    daemons.stop([sleeper], ROOT)
    assert not daemons.is_running(sleeper.pid)


def test_a_started_process_has_a_session_and_no_terminal_of_ours(sleeper: daemons.ProcessRecord) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert os.readlink(f"/proc/{sleeper.pid}/fd/0") == "/dev/null"


def test_kill_all_gives_up_on_what_comes_back() -> None:
    child = subprocess.Popen(["sleep", "60"])
    with pytest.raises(DeadlineExceeded, match="survived SIGKILL"):
        daemons.kill_all(lambda: [child.pid], timeout_s=0.1)
    assert child.wait() == -signal.SIGKILL


def test_run_tool_quotes_the_words_of_a_failure() -> None:
    with pytest.raises(ClusterError, match=r"exit 3\): the reason"):
        daemons.run_tool(["sh", "-c", "echo the reason >&2; exit 3"], env={"PATH": daemons.PATH})
    with pytest.raises(DeadlineExceeded, match="no answer"):
        daemons.run_tool(["sleep", "5"], env={"PATH": daemons.PATH}, timeout_s=0.05)


def test_the_shipped_cluster_profile_matches_the_defaults() -> None:
    path = Path(__file__).parents[2] / "cluster_profiles" / "devcluster.yaml"
    profile = ClusterProfile.model_validate(yaml.safe_load(path.read_text()))
    assert profile.device == "cpu"
    assert list(profile.partitions) == list(Shape().partitions)
    for partition in profile.partitions.values():
        assert partition.gpus_per_node == Shape().gpus_per_node
        assert partition.cpus_per_node == Shape().cpus_per_node
        assert partition.mem_per_node_mb == config.MEM_PER_NODE_MB
