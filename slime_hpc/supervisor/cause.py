"""How an attempt ended, told from the evidence there is."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slime_hpc.slurm.parse import QueueRow
from slime_hpc.types import Role


class Cause(enum.StrEnum):
    FINISHED = "finished"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    NODE_FAILURE = "node_failure"
    MISCONFIGURED = "misconfigured"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Ending:
    """Why an attempt ended, in one sentence, and who is to blame for it if anybody is."""

    cause: Cause
    detail: str
    role: Role | None = None
    node: str | None = None


def cause_of_signal(number: signal.Signals, cancelled_by: str | None, queue: Sequence[QueueRow]) -> Ending:
    """Of an attempt that was told to end: by whom, and why.

    ``cancelled_by`` is who left a cancel marker. Slurm shows the leader as COMPLETING whatever the
    reason; measured on 22.05, the reason tells a time limit, and a component that is already
    CANCELLED tells scancel.
    """
    if cancelled_by:
        return Ending(Cause.CANCELLED, f"cancelled with `slime-hpc cancel` by {cancelled_by}")
    if any(row.reason == "TimeLimit" for row in queue):
        return Ending(Cause.TIME_LIMIT, "the job reached its time limit")
    if any(row.state.name == "CANCELLED" for row in queue):
        return Ending(Cause.CANCELLED, "the job was cancelled with scancel")
    return Ending(Cause.UNKNOWN, f"Slurm sent {number.name}, and its records do not say why: scancel or preemption")


def cause_of_component(queue: Sequence[QueueRow]) -> Ending | None:
    """Of an attempt of which Slurm has ended a component while the leader runs on; None if it has not."""
    causes = {"CANCELLED": Cause.CANCELLED, "TIMEOUT": Cause.TIME_LIMIT, "PREEMPTED": Cause.PREEMPTED}
    for row in queue:
        if row.state.name in causes:
            return Ending(causes[row.state.name], f"Slurm ended component {row.job_id} of the job: {row.state}")
    return None


def describe_exit(returncode: int) -> str:
    """``signal 9 (SIGKILL)`` or ``exit code 3``, from Popen's or srun's way of saying it."""
    number = -returncode if returncode < 0 else returncode - 128
    if number in signal.valid_signals():
        return f"signal {number} ({signal.Signals(number).name})"
    return f"exit code {returncode}"
