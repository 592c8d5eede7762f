"""A Slurm in memory: jobs go through the states a test sets, and nothing runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_hpc.errors import SlurmCommandError
from slime_hpc.slurm.parse import AccountingRow, PartitionRow, QueueRow
from slime_hpc.types import JobId, JobState


@dataclass
class FakeComponent:
    """One component of a job; a test may change what stands here."""

    job_id: JobId
    raw_id: int
    state: JobState = field(default_factory=lambda: JobState("PENDING"))
    reason: str = "None"
    node_list: str = ""
    start: int | None = None
    end: int | None = None
    restarts: int = 0


@dataclass
class FakeJob:
    """What was submitted, and what became of it."""

    script: str
    token: str
    components: list[FakeComponent]
    forgotten: bool = False
    """slurmctld forgets a job some minutes (MinJobAge) after its end; accounting does not."""
    signals: list[tuple[str, bool]] = field(default_factory=list)
    """(signal, whether to the batch shell) of each ``cancel`` with a signal."""


class FakeSlurm:
    """Implements ``slime_hpc.slurm.commands.Slurm``; held to it by ``SlurmContract``."""

    def __init__(
        self,
        *,
        partitions: Sequence[str] = ("train", "rollout"),
        accounts: Sequence[str] = ("dev",),
        has_accounting: bool = True,
    ) -> None:
        self.jobs: dict[int, FakeJob] = {}
        self.has_accounting = has_accounting
        self._partitions = tuple(partitions)
        self._accounts = tuple(accounts)

    def set_state(self, job_id: JobId, state: str, *, component: int | None = None) -> None:
        """Put every component, or one, into a state by Slurm's name."""
        for part in self.jobs[job_id.number].components:
            if component in (None, part.job_id.component):
                _enter(part, JobState.parse(state))

    def submit(self, script: Path, *, token: str) -> JobId:
        text = script.read_text(encoding="utf-8")
        self.check(script)
        number = 1 + max((part.raw_id for job in self.jobs.values() for part in job.components), default=0)
        count = len(_blocks(text))
        ids = [JobId(number, offset if count > 1 else None) for offset in range(count)]
        self.jobs[number] = FakeJob(text, token, [FakeComponent(id_, number + n) for n, id_ in enumerate(ids)])
        return JobId(number)

    def check(self, script: Path) -> None:
        for options in _blocks(script.read_text(encoding="utf-8")):
            if options.get("partition", self._partitions[0]) not in self._partitions:
                raise _refusal(
                    f"invalid partition specified: {options['partition']}", "Invalid partition name specified"
                )
            if options.get("account", self._accounts[0]) not in self._accounts:
                raise _refusal("", "Invalid account or account/partition combination specified")

    def queue(self, job_ids: Sequence[JobId]) -> list[QueueRow]:
        jobs = [self.jobs[id_.number] for id_ in job_ids if id_.number in self.jobs]
        return [_queue_row(job, part) for job in jobs if not job.forgotten for part in job.components]

    def find(self, *tokens: str) -> list[QueueRow]:
        return self.queue([JobId(number) for number, job in self.jobs.items() if job.token in tokens])

    def accounting(self, job_ids: Sequence[JobId]) -> list[AccountingRow] | None:
        if not self.has_accounting:
            return None
        jobs = [self.jobs[id_.number] for id_ in job_ids if id_.number in self.jobs]
        return [_accounting_row(part) for job in jobs for part in job.components]

    def cancel(self, job_id: JobId, *, signal: str | None = None, batch: bool = False) -> None:
        job = self.jobs.get(job_id.number)
        if job is None:
            return
        if signal is not None:
            job.signals.append((signal, batch))
            return
        for part in job.components:
            if job_id.component in (None, 0, part.job_id.component) and not part.state.is_over:
                _enter(part, JobState("CANCELLED"))

    def partitions(self) -> list[PartitionRow]:
        return [PartitionRow(name, "UP", None, None, 2, f"{name}-[1-2]", "ALL", "ALL") for name in self._partitions]


def _enter(part: FakeComponent, state: JobState) -> None:
    part.state = state
    if state.is_running and part.start is None:
        part.start, part.node_list = int(time.time()), f"node-{part.raw_id}"
    if state.is_over:
        part.end = int(time.time())


def _blocks(script: str) -> list[dict[str, str]]:
    """sbatch options of each component."""
    blocks: list[dict[str, str]] = [{}]
    for line in script.splitlines():
        words = shlex.split(line.removeprefix("#SBATCH")) if line.startswith("#SBATCH ") else []
        if words == ["hetjob"]:
            blocks.append({})
        blocks[-1].update(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    return blocks


def _refusal(*words: str) -> SlurmCommandError:
    lines = [words[0], f"Batch job submission failed: {words[-1]}"]
    return SlurmCommandError(["sbatch"], 1, "\n".join(f"sbatch: error: {line}" for line in lines if line))


def _queue_row(job: FakeJob, part: FakeComponent) -> QueueRow:
    return QueueRow(
        part.job_id,
        part.raw_id,
        part.state,
        part.reason,
        part.node_list,
        part.start,
        part.end,
        part.restarts,
        job.token,
    )


def _accounting_row(part: FakeComponent) -> AccountingRow:
    by = 0 if part.state.name == "CANCELLED" else None
    failed = int(part.state.name == "FAILED")
    return AccountingRow(part.job_id, part.raw_id, part.state, by, failed, 0, part.node_list, part.start, part.end)
