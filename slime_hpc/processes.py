"""What /proc tells about processes that are not our children."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

_EXEC_S = 0.1
"""Between execve's two halves a process has no environment; the kernel takes microseconds, a busy machine longer."""
_POLL_S = 0.002


def read_environ(pid: int) -> frozenset[bytes]:
    """``NAME=value`` entries; none for a process that has ended, is the kernel's, or belongs to another user.

    Not by psutil, which reads no further than the first empty string, and retitling leaves many.
    """
    path = Path(f"/proc/{pid}/environ")
    deadline = time.monotonic() + _EXEC_S
    try:
        while not (content := path.read_bytes()) and _has_memory(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    except OSError:
        return frozenset()
    return frozenset(content.split(b"\0"))


def _has_memory(pid: int) -> bool:
    """False for zombies and kernel threads. Source: proc(5), statm."""
    return not Path(f"/proc/{pid}/statm").read_text(encoding="ascii").startswith("0 ")


def is_running(pid: int, started: float) -> bool:
    """Whether the process is still that one: a pid is given to others later. ``started``: psutil's ``create_time``."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
