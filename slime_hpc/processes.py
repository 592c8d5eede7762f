"""What /proc tells about processes that are not our children, and how a child is bound to its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_EXEC_S = 0.1
"""Between execve's two halves a process has no environment; the kernel takes microseconds, a busy machine longer."""
_POLL_S = 0.002
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


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


def read_stat(pid: int) -> tuple[str, int] | None:
    """State letter, and start in ticks since boot; None if there is no such process. Source: proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # it has ended, which is what None says
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def identity(pid: int) -> str | None:
    """Tells a process from every other that has its pid, before or after; None if it has ended.

    By ticks, not by the time of day: a clock may be set while the process runs.
    """
    stat = read_stat(pid)
    if stat is None or stat[0] in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{stat[1]}"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Set here and not between fork and exec: Python code there can deadlock in a threaded parent.
    """
    kill_with_parent()
    if os.getppid() != parent_pid:
        sys.exit(f"the process that started this one (pid {parent_pid}) is gone")


def kill_with_parent() -> None:
    """The same where the process is not ours to write: for ``preexec_fn``, one call into a library that is loaded."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
