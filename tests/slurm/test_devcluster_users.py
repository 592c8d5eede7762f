"""devcluster for ordinary users, for several of them, and side by side, against the real daemons.

Slurm knows users by name, so these are two that every Debian has.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devclusters import RunningDevCluster, boot, take_down

USER, OTHER = "nobody", "daemon"
UID = pwd.getpwnam(USER).pw_uid
SMALL = ("--no-accounting", "--train-nodes", "1", "--rollout-nodes", "1")

JOB = "id -u; echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES; srun id -un"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the user, and in reach of everybody, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    shutil.chown(path, USER)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def own() -> Iterator[RunningDevCluster]:
    """An ordinary user's, with accounting."""
    cluster = boot("--train-nodes", "1", "--rollout-nodes", "1", user=USER)
    yield cluster
    take_down(cluster)


@pytest.fixture
def second() -> Iterator[RunningDevCluster]:
    """Root's, without namespaces, started by a shell that closes its files to others."""
    cluster = boot("--no-netns", *SMALL, umask=0o077)
    yield cluster
    take_down(cluster)


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def run_job(cluster: RunningDevCluster, folder: Path, partition: str) -> list[str]:
    """The three lines that JOB has written, after a look at whose the file is."""
    output = folder / partition
    done = cluster.run("sbatch", f"--partition={partition}", "--gres=gpu:2", f"--output={output}", f"--wrap={JOB}")
    assert done.returncode == 0, done.stderr

    def lines() -> list[str]:
        return output.read_text().splitlines() if output.exists() else []

    wait_for(f"the job writes to {output}", lambda: len(lines()) == 3)
    assert output.owner() == cluster.user
    return lines()


def daemons(cluster: RunningDevCluster) -> list[int]:
    return [daemon["pid"] for daemon in cluster.status()["daemons"]]


def test_an_ordinary_user_has_a_slurm(own: RunningDevCluster, folder: Path) -> None:
    status = own.status()
    assert status["state"] == "up"
    assert {os.stat(f"/proc/{daemon['pid']}").st_uid for daemon in status["daemons"]} == {UID}
    assert {daemon["name"] for daemon in status["daemons"]} >= {"munged", "mariadbd", "slurmdbd"}
    for partition, node in (("train", "n1"), ("rollout", "n2")):
        assert run_job(own, folder, partition) == [str(UID), f"{node} 0,1", USER]
    columns = ("--noheader", "--parsable2", "--allocations", "--format=User,Account,Partition,State")
    wanted = [f"{USER}|dev|{partition}|COMPLETED" for partition in ("train", "rollout")]
    wait_for("sacct shows both jobs", lambda: own.run("sacct", *columns).stdout.splitlines() == wanted)


def test_up_says_what_it_lacks_without_root(own: RunningDevCluster) -> None:
    again = own.cli("up", "--train-nodes", "1", "--rollout-nodes", "1")
    assert (again.returncode, again.stderr) == (0, f"already up in {own.dir}\n")
    assert "no namespaces (not root): nodes share this machine's host name and network" in again.stdout


def test_a_users_slurm_is_closed_to_others(own: RunningDevCluster) -> None:
    """Its slurmd would run their srun as its own user; without a credential no request reaches it."""
    credential = ("munge", "--no-input", f"--socket={own.dir}/run/munge.sock")
    assert own.run(*credential).stdout.startswith("MUNGE:")
    stranger = own.as_user(OTHER)
    done = stranger.run(*credential)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "Permission denied" in done.stderr
    for verb in ("status", "env", "up", "down"):
        said = stranger.cli(verb)
        assert (said.returncode, said.stdout) == (2, "")
        assert USER in said.stderr
        assert "--dir" in said.stderr


def test_others_submit_to_roots(devcluster: RunningDevCluster, folder: Path) -> None:
    guest = devcluster.as_user(USER)
    assert guest.cli("env").stdout == f"export SLURM_CONF={devcluster.dir}/etc/slurm.conf\n"
    assert guest.status() == devcluster.status()
    for partition, nodes in (("train", ("n1", "n2")), ("rollout", ("n3", "n4"))):
        uid, where, step = run_job(guest, folder, partition)
        assert (uid, step) == (str(UID), USER)
        assert where in {f"{node} 0,1" for node in nodes}
    refused = guest.cli("down")
    assert refused.returncode == 2
    assert f"{devcluster.dir} belongs to root" in refused.stderr


def test_nodes_of_one_address(second: RunningDevCluster, folder: Path) -> None:
    status = second.status()
    assert (status["network"], second.traces().network()) == ("loopback", [])
    assert "no namespaces (--no-netns)" in status["note"]
    assert run_job(second.as_user(USER), folder, "train") == [str(UID), "n1 0,1", USER]
    done = second.run("srun", "--partition=rollout", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)")
    assert done.stdout == f"n2 {socket.gethostname()}\n", done.stderr
    other = second.cli("up", *SMALL)
    assert other.returncode == 2
    assert "runs with netns False, not True" in other.stderr


def test_side_by_side(devcluster: RunningDevCluster, own: RunningDevCluster, second: RunningDevCluster) -> None:
    before = [devcluster.status(), own.status()]
    detached = second.run("sbatch", "--output=/dev/null", "--wrap=setsid sleep 3600 & sleep 3600")
    assert detached.returncode == 0, detached.stderr
    traces = second.traces()
    wait_for("the job runs", lambda: sum(line == "sleep 3600 " for line in traces.processes().values()) == 2)
    down = second.cli("down")
    assert down.returncode == 0, down.stderr
    assert traces.processes() == {}
    assert [devcluster.status(), own.status()] == before
    assert [cluster.run("srun", "true").returncode for cluster in (devcluster, own)] == [0, 0]


def test_a_dead_one_is_told_from_a_live_one(own: RunningDevCluster) -> None:
    """Killed with a core, which belongs to the logs; then its pids given to others, as after a reboot."""
    mine = boot(*SMALL, user=USER)
    bystander = subprocess.Popen(["sleep", "3600"], user=UID)
    try:
        for pid in daemons(mine):
            os.kill(pid, signal.SIGSEGV)
        wait_for("the daemons die", lambda: mine.status()["state"] == "down")
        assert mine.cli("env").returncode == 2
        again = mine.cli("up", *SMALL)
        assert again.returncode == 0, again.stderr
        assert "removing what an earlier start has left" in again.stderr
        assert mine.run("srun", "--partition=rollout", "id", "-un").stdout == f"{USER}\n"

        for pid in daemons(mine):
            os.kill(pid, signal.SIGKILL)
        give_pids_to(bystander.pid, mine.dir / "state.json")
        assert mine.status()["state"] == "down"
        down = mine.cli("down")
        assert (down.returncode, down.stdout) == (0, f"down; logs are in {mine.dir}/log\n"), down.stderr
        assert bystander.poll() is None
        assert own.status()["state"] == "up"
    finally:
        bystander.kill()
        bystander.wait()
        take_down(mine)


def give_pids_to(pid: int, state: Path) -> None:
    record: dict[str, Any] = json.loads(state.read_text())
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    for process in record["processes"].values():
        process.update(pid=pid, start_ticks=ticks)
    state.write_text(json.dumps(record))


def chosen(folder: Path, name: str, mode: int, owner: str) -> Path:
    path = folder / name
    path.mkdir()
    shutil.chown(path, owner)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("name", "mode", "owner", "rule"),
    [
        ("with space", 0o755, USER, "characters that slurm.conf cannot quote"),
        ("Straße", 0o755, USER, "characters that slurm.conf cannot quote"),
        ("d" * 90, 0o755, USER, "bytes too long: Unix sockets below it may have 107 bytes of path"),
        ("read-only", 0o555, USER, "is read-only (mode 555)"),
        ("open", 0o775, USER, "others may write to"),
        ("foreign", 0o755, OTHER, f"belongs to {OTHER}"),
        ("closed/below", 0o700, OTHER, "cannot hold a devcluster: Permission denied"),
    ],
)
def test_directories_it_cannot_live_in(folder: Path, name: str, mode: int, owner: str, rule: str) -> None:
    path = chosen(folder, name.split("/")[0], mode, owner)
    refused = RunningDevCluster(folder / name, USER).cli("up", *SMALL)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert str(folder / name) in refused.stderr
    assert rule in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_file_is_no_directory(folder: Path, verb: str) -> None:
    path = folder / "file"
    path.write_text("precious")
    refused = RunningDevCluster(path).cli(verb)
    assert refused.returncode == 2
    assert f"{path} cannot hold a devcluster: Not a directory" in refused.stderr
    assert path.read_text() == "precious"


def test_missing_packages_are_named(folder: Path) -> None:
    hidden = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("slurmctld", "munged")]
    assert all(hidden)
    cluster = RunningDevCluster(folder / "dc")
    hide = "".join(f"mount --bind /dev/null {path} && " for path in hidden)
    argv = cluster.cli_argv("up", *SMALL)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh", *argv], text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert "not installed: munged, slurmctld; install them, as root: apt-get install slurm-wlm" in done.stderr
    assert not cluster.dir.exists()
