"""The end of an attempt, in order and in bounded time. Never signals an srun: that is a SIGKILL to its whole step."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime_hpc.errors import ClusterError
from slime_hpc.records import EventLog, read_json, write_json
from slime_hpc.run_dir import AttemptDir
from slime_hpc.supervisor.control import send
from slime_hpc.supervisor.sweep import end_tagged

DRIVER_STOP_S = 5.0
AGENTS_STOP_S = 15.0
"""Together well under Slurm's default KillWait of 30 s, after which everything is killed anyway."""


def tear_down(
    attempt: AttemptDir, token: str, steps: Mapping[str, subprocess.Popen[bytes]], log: EventLog, reason: str
) -> None:
    """Stop the driver, then every agent (each ends its raylet and sweeps its node), then sweep this host."""
    write_json(attempt.stop, {"reason": reason})
    driver = {name: step for name, step in steps.items() if name == "driver" and step.poll() is None}
    if driver:
        _tell([attempt.driver_control], attempt, reason)
        _wait(driver, DRIVER_STOP_S, log)
    _tell(sorted(attempt.path.glob("node-*.json")), attempt, reason)
    _wait(steps, AGENTS_STOP_S, log)
    left = end_tagged(f"{token}.", timeout_s=5.0)
    log("torn_down", left=left)


def _tell(addresses: Sequence[object], attempt: AttemptDir, reason: str) -> None:
    """Send ``stop`` to each party that has written its address down, all at once."""
    token = attempt.control_token.read_text(encoding="utf-8")

    def tell(path: object) -> None:
        try:
            host, port = read_json(path)["control"]  # type: ignore[arg-type]
            send((host, port), token, {"type": "stop", "reason": reason}, timeout_s=3.0)
        except (OSError, ClusterError):
            return  # not up yet, or gone already: the waits and the sweep that follow settle it

    if addresses:
        with ThreadPoolExecutor(max_workers=min(64, len(addresses))) as pool:
            list(pool.map(tell, addresses))


def _wait(steps: Mapping[str, subprocess.Popen[bytes]], timeout_s: float, log: EventLog) -> None:
    deadline = time.monotonic() + timeout_s
    while running := [name for name, step in steps.items() if step.poll() is None]:
        if time.monotonic() > deadline:
            log("stop_timed_out", steps=running, timeout_s=timeout_s)
            return
        time.sleep(0.1)
