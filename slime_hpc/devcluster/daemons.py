"""Start, recognise and stop processes that outlive us, and never touch one that is not ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.processes import read_environ, read_stat

MARKER = "SLIME_HPC_DEVCLUSTER_ROOT"
"""In the environment of every process we start, and so of slurmstepds: which devcluster it belongs to."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
APT_PACKAGES = "slurm-wlm slurmdbd munge mariadb-server iproute2"

_POLL_S = 0.03


@dataclass(frozen=True)
class ProcessRecord:
    """A process by pid and start time (clock ticks since boot), so that a reused pid is not mistaken for it."""

    pid: int
    start_ticks: int


def require_binaries(names: Iterable[str]) -> None:
    missing = [name for name in names if shutil.which(name, path=PATH) is None]
    if missing:
        raise ClusterError(
            f"not installed: {', '.join(missing)}; install them, as root: apt-get install {APT_PACKAGES}"
        )


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path) -> ProcessRecord:
    """Start a process in a session of its own: it has no pipe to us and no terminal to lose."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd, start_new_session=True,
            umask=0o022,
        )  # fmt: skip
    stat = read_stat(process.pid)
    return ProcessRecord(process.pid, stat[1] if stat else -1)


def all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def is_running(pid: int) -> bool:
    """False for a zombie too: where PID 1 does not reap, ended processes stay visible for ever."""
    stat = read_stat(pid)
    return stat is not None and stat[0] not in "ZX"


def is_same_process(record: ProcessRecord) -> bool:
    """True if the pid is still this process's: all that can be told of another user's."""
    stat = read_stat(record.pid)
    return stat is not None and stat[0] not in "ZX" and stat[1] == record.start_ticks


def is_alive(record: ProcessRecord, root: Path) -> bool:
    """True if this very process still runs and carries the marker of the devcluster at ``root``."""
    return is_same_process(record) and f"{MARKER}={root}".encode() in read_environ(record.pid)


def stop(records: Sequence[ProcessRecord], root: Path, *, patience_s: float = 8) -> None:
    """TERM, then KILL, to those still alive; returns when none is, else DeadlineExceeded."""
    for signum, timeout_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + timeout_s
        for record in records:
            if is_alive(record, root):
                _signal(record.pid, signum)
        while any(is_alive(record, root) for record in records) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    left = [record.pid for record in records if is_alive(record, root)]
    if left:
        raise DeadlineExceeded(f"processes {left} of the devcluster survived SIGKILL; look at them with ps, then retry")


def kill_all(find: Callable[[], list[int]], *, timeout_s: float = 10) -> int:
    """KILL what ``find`` returns until it returns nothing (killing a parent may reveal more); how many."""
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while pids := find():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"processes {pids} of the devcluster survived SIGKILL for {timeout_s:.0f} s")
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(_POLL_S)
    return len(killed)


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal, as wanted
        os.kill(pid, signum)


def wait_until(what: str, condition: Callable[[], bool], *, timeout_s: float, explain: Callable[[], str]) -> None:
    """Poll until true; DeadlineExceeded names ``what`` and adds ``explain()``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what}: not within {timeout_s:.0f} s; {explain()}")
        time.sleep(_POLL_S)


def accepts(endpoint: Path | tuple[str, int]) -> bool:
    """True if something listens at a Unix socket or a TCP address."""
    family = socket.AF_UNIX if isinstance(endpoint, Path) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(endpoint) if isinstance(endpoint, Path) else endpoint) == 0


def run_tool(argv: Sequence[str], *, env: Mapping[str, str], stdin: str = "", timeout_s: float = 30) -> str:
    """Output of a command that ends by itself; ClusterError quotes its words when it fails."""
    # Files, not pipes: a child that outlives the command would hold a pipe open, and us past the deadline.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                argv, env=env, input=stdin, text=True, stdout=output, stderr=errors, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(f"{' '.join(argv)}: no answer within {timeout_s:.0f} s") from error
        said, complained = _content(output), _content(errors)
    if done.returncode:
        words = (complained or said).strip() or "it printed nothing"
        raise ClusterError(f"{' '.join(argv)} failed (exit {done.returncode}): {words}")
    return said


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log, for an error message."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
