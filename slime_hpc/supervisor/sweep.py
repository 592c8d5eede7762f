"""The last net: processes are found by a variable in their environment, whatever name or parent they have."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import psutil

TAG = "SLIME_HPC_TAG"


def tag(token: str, attempt: int, node: str) -> str:
    """Value of the variable for everything that an attempt starts on one node.

    It has an end mark: no node's tag is the beginning of another's.
    """
    return f"{token}.a{attempt}.{node}/"


def sweep(prefix: str, *, timeout_s: float) -> list[int]:
    """SIGKILL every process of this user whose tag starts with ``prefix``, until none is left.

    This process and those above it are spared. Returns the pids still there after the time-out.
    """
    deadline = time.monotonic() + timeout_s
    while found := list(_tagged(prefix)):
        for process in found:
            _kill(process)
        psutil.wait_procs(found, timeout=0.2)
        if time.monotonic() > deadline:
            return [process.pid for process in found if process.is_running()]
    return []


def _tagged(prefix: str) -> Iterator[psutil.Process]:
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        try:
            is_ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            if is_ours and process.environ().get(TAG, "").startswith(prefix):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or not ours to look at: then not ours to end


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # ended by itself, as wanted


def descendants(pid: int, names: Sequence[str]) -> list[psutil.Process]:
    """Children, at any depth, of one process that carry one of these names."""
    return [child for child in psutil.Process(pid).children(recursive=True) if child.name() in names]
