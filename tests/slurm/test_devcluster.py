"""devcluster against the real daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster, boot, take_down

HET_JOB = """\
#!/bin/bash
#SBATCH --partition=train --nodes=1 --gres=gpu:2 --output={output}
#SBATCH hetjob
#SBATCH --partition=rollout --nodes=1 --gres=gpu:3
srun --het-group=0,1 sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'
"""

# Ignores SIGTERM, and leaves a process that nothing but its network namespace ties to the job.
STUBBORN_JOB = """\
#!/bin/bash
#SBATCH --output=/dev/null
trap '' TERM
(env -i /usr/bin/setsid /usr/bin/sleep 3600 &)
srun sleep 3600
"""


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.2)


def submit(cluster: RunningDevCluster, script: Path, text: str) -> str:
    script.write_text(text)
    done = cluster.run("sbatch", "--parsable", str(script))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def second() -> Iterator[RunningDevCluster]:
    """A small devcluster without accounting, beside the session's."""
    cluster = boot("--no-accounting", "--train-nodes", "1", "--rollout-nodes", "1")
    yield cluster
    take_down(cluster)


def test_sacct_shows_a_het_job_over_both_partitions(devcluster: RunningDevCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = submit(devcluster, tmp_path / "het.sbatch", HET_JOB.format(output=output))

    def rows() -> list[str]:
        columns = "--format=JobID,Partition,Account,State"
        return devcluster.run("sacct", "-X", "-n", "-P", "-j", job, columns).stdout.splitlines()

    expected = [f"{job}+0|train|dev|COMPLETED", f"{job}+1|rollout|dev|COMPLETED"]
    wait_for("sacct shows both components", lambda: rows() == expected)
    nodes = dict(line.split() for line in output.read_text().splitlines())
    assert sorted(nodes.values()) == ["0,1", "0,1,2"]
    assert {name for name, gpus in nodes.items() if gpus == "0,1"} <= {"n1", "n2"}
    assert {name for name, gpus in nodes.items() if gpus == "0,1,2"} <= {"n3", "n4"}


@pytest.mark.parametrize("partition", ["train", "rollout"])
def test_each_node_has_its_own_name_and_address(devcluster: RunningDevCluster, partition: str) -> None:
    show = "echo $(hostname) $(ip -4 -o address show eth0 | awk '{print $4}') $(getent hosts $(hostname))"
    done = devcluster.run("srun", "--partition", partition, "--nodes=2", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    seen = {name: (own, resolved) for name, own, resolved, _ in map(str.split, done.stdout.splitlines())}
    expected = {
        node["name"]: node["address"] for node in devcluster.status()["nodes"] if node["partition"] == partition
    }
    assert seen == {name: (f"{address}/24", address) for name, address in expected.items()}
    assert len({own for own, _ in seen.values()}) == 2


def test_nodes_reach_each_other_by_name(devcluster: RunningDevCluster) -> None:
    connect = (
        "import os, socket, time\n"
        "if os.environ['SLURM_PROCID'] == '0':\n"
        "    server = socket.create_server(('n1', 5555)); server.settimeout(15)\n"
        "    print(socket.gethostbyaddr(server.accept()[1][0])[0])\n"
        "else:\n"
        "    for _ in range(100):\n"
        "        if socket.socket().connect_ex(('n1', 5555)) == 0: break\n"
        "        time.sleep(0.1)\n"
    )
    done = devcluster.run("srun", "--nodes=2", "python3", "-c", connect)
    assert (done.returncode, done.stdout) == (0, "n2\n"), done.stderr


def test_two_jobs_on_one_node_get_different_gpus(devcluster: RunningDevCluster, tmp_path: Path) -> None:
    """GPUs are scheduled, not just declared."""
    show = "echo $CUDA_VISIBLE_DEVICES; sleep 2"
    argv = ["srun", "--nodelist=n1", "--gres=gpu:2", "sh", "-c", show]
    jobs = [subprocess.Popen(argv, env=devcluster.env(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(job.communicate(timeout=30)[0] for job in jobs) == ["0,1\n", "2,3\n"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--account=nobody", "Invalid account"),
        ("--qos=nonesuch", "Invalid qos"),
        ("--time=3-0", "time limit is invalid"),
        ("--nodes=3", "Node count specification invalid"),
        ("--partition=nonesuch", "invalid partition"),
        ("--gres=gpu:5", "Requested node configuration is not available"),
    ],
)
def test_slurm_refuses_at_submission(devcluster: RunningDevCluster, option: str, words: str) -> None:
    done = devcluster.run("sbatch", option, "--wrap=true")
    assert done.returncode != 0
    assert words in done.stderr


def test_the_second_qos_is_usable(devcluster: RunningDevCluster) -> None:
    done = devcluster.run("srun", "--qos=high", "printenv", "SLURM_JOB_QOS")
    assert (done.returncode, done.stdout) == (0, "high\n"), done.stderr


def test_nothing_of_the_caller_reaches_a_daemon(devcluster: RunningDevCluster) -> None:
    for daemon in devcluster.status()["daemons"]:
        names = {line.split("=")[0] for line in Path(f"/proc/{daemon['pid']}/environ").read_text().split("\0") if line}
        assert {name for name in names if name.startswith(("SLURM", "SBATCH"))} == {"SLURM_CONF"}, daemon["name"]
        assert os.getsid(daemon["pid"]) == daemon["pid"]


def test_up_is_idempotent(devcluster: RunningDevCluster) -> None:
    before = devcluster.status()
    again = devcluster.cli("up")
    assert again.returncode == 0
    assert f"already up in {devcluster.dir}" in again.stderr
    assert devcluster.status()["daemons"] == before["daemons"]
    assert before["state"] == "up"
    assert before["partitions"] == {"train": ["n1", "n2"], "rollout": ["n3", "n4"]}


def test_env_is_for_eval(devcluster: RunningDevCluster) -> None:
    assert devcluster.cli("env").stdout == f"export SLURM_CONF={devcluster.dir}/etc/slurm.conf\n"


def test_up_repairs_a_dead_daemon(second: RunningDevCluster) -> None:
    dead = next(daemon for daemon in second.status()["daemons"] if daemon["name"] == "slurmd-n2")
    os.kill(dead["pid"], signal.SIGKILL)
    wait_for("status is partial", lambda: second.status()["state"] == "partial")
    again = second.cli("up", "--no-accounting", "--train-nodes", "1", "--rollout-nodes", "1")
    assert again.returncode == 0, again.stderr
    assert "half dead: slurmd-n2" in again.stderr
    assert second.run("srun", "--partition=rollout", "hostname").stdout == "n2\n"


def test_down_leaves_nothing_and_touches_nothing_else(
    devcluster: RunningDevCluster, second: RunningDevCluster, tmp_path: Path
) -> None:
    bystander = subprocess.Popen(["sleep", "3600"], env={"SLURM_CONF": str(second.dir / "etc" / "slurm.conf")})
    before = devcluster.status()
    try:
        submit(second, tmp_path / "stubborn.sbatch", STUBBORN_JOB)
        traces = second.traces()
        wait_for("the job runs", lambda: sum("sleep 3600" in line for line in traces.processes().values()) >= 4)
        down = second.cli("down")
        assert down.returncode == 0, down.stderr
        assert traces.processes() == {}
        assert traces.network() == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert second.status()["state"] == "down"
    assert second.cli("down").stdout == f"nothing is up in {second.dir}\n"
    env = second.cli("env")
    assert (env.returncode, env.stdout) == (2, "")
    assert f"slime-hpc devcluster up --dir {second.dir}" in env.stderr
    assert devcluster.status() == before
    assert devcluster.run("srun", "hostname").returncode == 0
