"""Two nets for processes, whatever name, parent or session they have taken: descent, and a tag in the environment.

Neither does alone. A process that retitles itself, as Ray's do, may overwrite its environment; and descent is lost
when the agent that should have kept it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil

from slime_hpc.processes import read_environ

TAG = "SLIME_HPC_TAG"
PR_SET_CHILD_SUBREAPER = 36


def tag(token: str, attempt: int, node: str) -> str:
    """Value of the variable for everything that an attempt starts on one node.

    It has an end mark: no node's tag is the beginning of another's.
    """
    return f"{token}.a{attempt}.{node}/"


def adopt_orphans() -> None:
    """From now on, descendants of this process whose parents end become its children, not init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(*, timeout_s: float) -> list[int]:
    """SIGKILL every descendant of this process, until none is left. Returns the pids that stay after the time-out."""
    return _kill_all(lambda: psutil.Process().children(recursive=True), timeout_s)


def end_tagged(prefix: str, *, timeout_s: float) -> list[int]:
    """SIGKILL every process of this user whose tag starts with ``prefix``, sparing this one and those above it.

    Returns the pids that stay after the time-out.
    """
    return _kill_all(lambda: _tagged(prefix), timeout_s)


def _kill_all(look: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while found := [process for process in look() if _is_alive(process)]:
        if time.monotonic() > deadline:
            return [process.pid for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself, as wanted
                process.kill()
        psutil.wait_procs(found, timeout=0.2)
    return []


def _tagged(prefix: str) -> Iterator[psutil.Process]:
    wanted = f"{TAG}={prefix}".encode()
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in spared and any(entry.startswith(wanted) for entry in read_environ(process.pid)):
            yield process


def _is_alive(process: psutil.Process) -> bool:
    """False for a zombie: it waits only for its parent to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int, names: Sequence[str]) -> list[psutil.Process]:
    """Living children, at any depth, of one process that carry one of these names."""
    return [c for c in psutil.Process(pid).children(recursive=True) if c.name() in names and _is_alive(c)]
