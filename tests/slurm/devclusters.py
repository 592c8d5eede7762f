"""Devclusters for tests: boot one, operate it as a user does, take it down and look for traces."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

# Becomes the user only when everything is imported: the interpreter may lie where only root can read.
CLI_AS = """\
import contextlib, io, os, pwd, sys
import rich.console, rich.table, slime_hpc.cli, slime_hpc.devcluster
for verb in ("status", "env"):
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()) as _, contextlib.redirect_stdout(_):
        slime_hpc.cli.main(["devcluster", verb, "--dir", "/nonexistent"])
rich.console.Console(file=io.StringIO()).print(rich.table.Table("column", box=None))
user = pwd.getpwnam(sys.argv.pop(1))
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
slime_hpc.cli.main()
"""


@dataclass(frozen=True)
class RunningDevCluster:
    """A devcluster, operated as a user does: through the command line and SLURM_CONF."""

    dir: Path
    user: str = "root"

    def as_user(self, name: str) -> RunningDevCluster:
        return replace(self, user=name)

    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.dir / "etc" / "slurm.conf")}

    def run(self, *argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command against this cluster."""
        return subprocess.run(
            argv, env=self.env(), text=True, capture_output=True, timeout=timeout_s, check=False, **self._identity()
        )

    def _identity(self) -> dict[str, Any]:
        if self.user == "root":
            return {}
        user = pwd.getpwnam(self.user)
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": (), "cwd": "/"}

    def cli(self, verb: str, *options: str, umask: int = -1) -> subprocess.CompletedProcess[str]:
        """``slime-hpc devcluster VERB --dir DIR``, in a process that ends: daemons must outlive it."""
        argv = self.cli_argv(verb, *options)
        return subprocess.run(argv, text=True, capture_output=True, timeout=180, check=False, umask=umask)

    def cli_argv(self, verb: str, *options: str) -> list[str]:
        return [sys.executable, "-c", CLI_AS, self.user, "devcluster", verb, "--dir", str(self.dir), *options]

    def status(self) -> dict[str, Any]:
        done = self.cli("status", "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def traces(self) -> Traces:
        state = json.loads((self.dir / "state.json").read_text())
        return Traces(str(self.dir), f"slime{state['network'].get('tag', ': none')}")


@dataclass(frozen=True)
class Traces:
    """What a devcluster has on this machine, looked up without its own code; outlives its state file."""

    dir: str
    prefix: str

    def processes(self) -> dict[int, str]:
        """Running processes on its hosts or naming its directory, by pid."""
        namespaces = {os.stat(path).st_ino for path in self._namespaces()}
        return {pid: line for pid, line in _running() if self._mentions(pid) or _net_of(pid) in namespaces}

    def network(self) -> list[str]:
        devices = [name for name in os.listdir("/sys/class/net") if name.startswith(self.prefix)]
        return devices + [str(path) for path in self._namespaces()]

    def _namespaces(self) -> list[Path]:
        return list(Path("/run/netns").glob(f"{self.prefix}-*"))

    def _mentions(self, pid: int) -> bool:
        try:
            texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            return False  # it has ended meanwhile
        return any(self.dir.encode() in text for text in texts)


def _running() -> Iterator[tuple[int, str]]:
    """Pid and command line of all processes but zombies (PID 1 may not reap), ourselves and our children.

    A cluster's daemons are nobody's children; multiprocessing's helpers of other tests are ours, and have SLURM_CONF.
    """
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in ours:
            continue
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if line:
            yield int(entry), line.replace(b"\0", b" ").decode(errors="replace")


def _net_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None  # it has ended meanwhile


def boot(*options: str, user: str = "root", umask: int = -1) -> RunningDevCluster:
    """A user's devcluster in a short directory: sockets allow about 70 characters of path."""
    assert os.geteuid() == 0, "tests/slurm need root: nodes are network namespaces"
    cluster = RunningDevCluster(Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp")), user)
    cluster.dir.chmod(0o755)
    shutil.chown(cluster.dir, user)
    done = cluster.cli("up", *options, umask=umask)
    if done.returncode:
        shutil.rmtree(cluster.dir)
        pytest.fail(f"devcluster up failed:\n{done.stdout}{done.stderr}")
    return cluster


def take_down(cluster: RunningDevCluster) -> None:
    """Take it down, unless the test has, and check that nothing of it is left."""
    if (cluster.dir / "state.json").exists():
        traces = cluster.traces()
        done = cluster.cli("down")
        assert done.returncode == 0, done.stderr
        assert traces.processes() == {}
        assert traces.network() == []
    assert [path.name for path in cluster.dir.iterdir()] == ["log"]
    shutil.rmtree(cluster.dir)
