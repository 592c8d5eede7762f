"""Text of Slurm's commands → typed rows. Pure; the options that make Slurm print this text stand beside the parser."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from slime_hpc.errors import ClusterError
from slime_hpc.spec.values import parse_time_s
from slime_hpc.types import JobId, JobState

Row = TypeVar("Row")

QUEUE_FORMAT = ",".join(
    f"{column}:|"
    for column in (
        "JobID", "HetJobID", "HetJobOffset", "State", "Reason", "NodeList", "StartTime", "EndTime", "RestartCnt",
        "Comment",
    )
)  # fmt: skip
"""For ``squeue --noheader -O``. A suffix without a size: untruncated. Comment is last, since it may hold ``|``."""

ACCOUNTING_FORMAT = "JobID,JobIDRaw,State,ExitCode,NodeList,Start,End"
"""For ``sacct --parsable2 --format``, header kept."""

TIME_FORMAT = "%s"
"""SLURM_TIME_FORMAT that both are asked with: Unix seconds, whatever the time zone."""


@dataclass(frozen=True)
class QueueRow:
    """One job, or one component of a heterogeneous job (``job_id`` 12+0, 12+1, …), as squeue shows it."""

    job_id: JobId
    raw_id: int
    """Slurm's own number of the component: 12+1 is job 13."""
    state: JobState
    reason: str
    node_list: str
    """For ``hosts.expand_nodes``; empty while there are none."""
    start: int | None
    """Unix seconds; the expected start while pending, if Slurm has worked one out."""
    end: int | None
    """Unix seconds; the time limit's end while running."""
    restarts: int
    comment: str

    @property
    def is_leader(self) -> bool:
        return not self.job_id.component


@dataclass(frozen=True)
class AccountingRow:
    """One job or component as sacct shows it: the last of its lives.

    A heterogeneous job may stand there for a moment as a bare ``12``, before its components do.
    """

    job_id: JobId
    raw_id: int
    state: JobState
    cancelled_by: int | None
    """User id, where the state says so."""
    exit_code: int
    signal: int
    node_list: str
    start: int | None
    end: int | None

    @property
    def is_leader(self) -> bool:
        return not self.job_id.component


@dataclass(frozen=True)
class PartitionRow:
    """One partition as ``scontrol show partition`` shows it; a limit of None means there is none."""

    name: str
    state: str
    max_time_s: int | None
    max_nodes: int | None
    total_nodes: int
    node_list: str
    allow_accounts: str
    allow_qos: str


def parse_submission(stdout: str) -> JobId:
    """The id in sbatch's answer, default or ``--parsable``; warnings and site banners around it are passed over."""
    for pattern in (_SUBMITTED, _PARSABLE):
        matches = [m for line in stdout.splitlines() if (m := pattern.fullmatch(line.strip()))]
        if len(matches) == 1:
            return JobId(int(matches[0]["number"]), cluster=matches[0]["cluster"])
    raise ClusterError(f"sbatch accepted the script, but its answer names no job id: {stdout.strip()!r}")


_SUBMITTED = re.compile(r"Submitted batch job (?P<number>\d+)(?: on cluster (?P<cluster>\S+))?")
_PARSABLE = re.compile(r"(?P<number>\d+)(?:;(?P<cluster>\S+))?")


def parse_queue(stdout: str) -> list[QueueRow]:
    """Rows of ``squeue --noheader -O QUEUE_FORMAT``."""
    return [_row("squeue", _queue_row, line) for line in stdout.splitlines() if line.strip()]


def _queue_row(line: str) -> QueueRow:
    fields = line.removesuffix("|").split("|", 9)
    raw, leader, offset, state, reason, nodes, start, end, restarts, comment = fields
    return QueueRow(
        job_id=JobId(int(raw)) if leader == "N/A" else JobId(int(leader), int(offset)),
        raw_id=int(raw),
        state=JobState.parse(state),
        reason=reason,
        node_list=nodes,
        start=_time(start),
        end=_time(end),
        restarts=int(restarts),
        comment="" if comment == "(null)" else comment,
    )


def parse_accounting(stdout: str) -> list[AccountingRow]:
    """Rows of ``sacct --parsable2 --format=ACCOUNTING_FORMAT``; those of job steps are left out."""
    header, *lines = stdout.splitlines() or [""]
    if header and header != ACCOUNTING_FORMAT.replace(",", "|"):
        raise _unreadable("sacct", header)
    return [_row("sacct", _accounting_row, line) for line in lines if "." not in line.split("|", 1)[0]]


def _accounting_row(line: str) -> AccountingRow:
    job_id, raw, state, exit_code, nodes, start, end = line.split("|")
    code, _, signal = exit_code.partition(":")
    canceller = re.fullmatch(r"CANCELLED by (\d+)", state)
    return AccountingRow(
        job_id=JobId.parse(job_id),
        raw_id=int(raw),
        state=JobState.parse(state),
        cancelled_by=int(canceller[1]) if canceller else None,
        exit_code=int(code),
        signal=int(signal or 0),
        node_list="" if nodes == "None assigned" else nodes,
        start=_time(start),
        end=_time(end),
    )


def parse_partitions(stdout: str) -> list[PartitionRow]:
    """Rows of ``scontrol --oneliner show partition``."""
    return [_row("scontrol", _partition_row, line) for line in stdout.splitlines() if line.strip()]


def _partition_row(line: str) -> PartitionRow:
    fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
    return PartitionRow(
        name=fields["PartitionName"],
        state=fields["State"],
        max_time_s=None if fields["MaxTime"] == "UNLIMITED" else parse_time_s(fields["MaxTime"]),
        max_nodes=None if fields["MaxNodes"] == "UNLIMITED" else int(fields["MaxNodes"]),
        total_nodes=int(fields["TotalNodes"]),
        node_list="" if fields["Nodes"] == "(null)" else fields["Nodes"],
        allow_accounts=fields.get("AllowAccounts", "ALL"),
        allow_qos=fields.get("AllowQos", "ALL"),
    )


def _time(text: str) -> int | None:
    """Unix seconds, or None for ``N/A``, ``Unknown`` and ``None``."""
    return int(text) if text.isdigit() else None


def _row(command: str, parse: Callable[[str], Row], line: str) -> Row:
    try:
        return parse(line)
    except (KeyError, ValueError) as error:
        raise _unreadable(command, line) from error


def _unreadable(command: str, line: str) -> ClusterError:
    return ClusterError(
        f"cannot read a line of {command}'s answer: {line!r}; please report it with `{command} --version`"
    )
