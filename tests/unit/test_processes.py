"""What /proc tells, also at the moments when it tells nothing."""

from __future__ import annotations

import os
import subprocess
import time

from slime_hpc.processes import read_environ

MARK = b"MARK=1"
EXECS = 'exec env sh -c \'exec env sh -c "exec env sh -c \\"exec env sleep 60\\""\''


def test_a_process_keeps_its_environment_while_it_execs() -> None:
    """A bare read of /proc returns nothing between execve's two halves, about once in a hundred looks here."""
    env = {"MARK": "1", "PATH": os.environ["PATH"]}
    for _ in range(20):
        process = subprocess.Popen(["sh", "-c", EXECS], env=env)
        try:
            deadline = time.monotonic() + 0.03
            while time.monotonic() < deadline:
                assert MARK in read_environ(process.pid)
        finally:
            process.kill()
            process.wait()


def test_what_has_ended_has_none() -> None:
    process = subprocess.Popen(["true"], env={"MARK": "1", "PATH": os.environ["PATH"]})
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert MARK not in read_environ(process.pid)
    process.wait()
    assert read_environ(process.pid) == frozenset()
