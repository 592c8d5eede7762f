"""What a status is joined from: what a run's directory holds, and what Slurm, or this host, says of its job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slime_hpc.errors import ClusterError, UserError
from slime_hpc.plan import JobPlan, is_anothers, read_plan
from slime_hpc.processes import identity
from slime_hpc.records import last_round_row, read_ended, read_heartbeat, read_owner, read_submit
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.slurm.parse import AccountingRow, QueueRow
from slime_hpc.types import JobId, JobState


@dataclass(frozen=True)
class Records:
    """What a run directory holds."""

    run: RunDir
    plans: tuple[JobPlan, ...]
    """One an attempt, oldest first."""
    submitted: dict[str, Any] | None
    owners: dict[int, dict[str, Any]]
    """Who started it, by attempt."""
    ended: dict[int, dict[str, Any]]
    """``ended.json`` by attempt."""
    heartbeat: dict[str, Any] | None
    """The newest attempt's."""
    last_round: dict[str, Any] | None
    """The newest row of metrics."""

    @property
    def plan(self) -> JobPlan:
        return self.plans[-1]


@dataclass(frozen=True)
class ComponentState:
    """One component of the job as Slurm shows it, in its queue or in its accounts."""

    state: JobState
    reason: str
    start: float | None
    end: float | None


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says of a run's job. ``components`` is empty where it knows nothing of it."""

    job_id: JobId | None
    components: dict[int, ComponentState]
    problem: str = ""
    """Why Slurm could not be asked."""
    process: str = ""
    """Of a run without Slurm: what trains it. One component that runs stands for a process that is alive."""


def read_records(run: RunDir) -> Records:
    """UserError where ``run`` is not a run directory."""
    plans = tuple(read_plan(attempt.plan) for attempt in run.all_attempts() if attempt.plan.exists())
    if not plans:
        hint = "; is the run's directory meant? The profile names it as run_dir" if run.path.is_file() else ""
        raise UserError(f"{run.path} is not a run directory: it has no attempts/0001/plan.json{hint}")
    beat = read_heartbeat(run.heartbeat)
    return Records(
        run=run,
        plans=plans,
        submitted=read_submit(run.submit),
        owners={a.number: owner for a in run.all_attempts() if (owner := read_owner(a.owner))},
        ended={a.number: ended for a in run.all_attempts() if (ended := read_ended(a.ended))},
        heartbeat=beat if beat is not None and beat["attempt"] == plans[-1].attempt else None,
        last_round=last_round_row(run.metrics),
    )


def query_job(records: Records, slurm: Slurm) -> JobFacts:
    """The job by its recorded id; where the client died before it recorded one, by the plan's token."""
    return query_jobs([records], slurm)[0]


def query_jobs(runs: Sequence[Records], slurm: Slurm, *, ended_too: bool = True) -> list[JobFacts]:
    """Each run's job, all of them asked for at once: slurmctld serves everybody.

    Without ``ended_too``, the accounts are not asked about runs that recorded their end themselves.
    """
    in_slurm = {records.plan.token: records for records in runs if not is_local(records)}
    jobs = {token: recorded_job_id(records) for token, records in in_slurm.items()}
    try:
        jobs |= _find_job_ids([token for token, job in jobs.items() if job is None], slurm)
        facts = {token: JobFacts(job, _components(rows)) for token, (job, rows) in _ask(slurm.queue, jobs).items()}
    except ClusterError as e:
        # The directories alone still say much; the reports say that Slurm was not heard.
        facts = {token: JobFacts(job, {}, problem=str(e)) for token, job in jobs.items()}
    else:
        unknown = {
            token: jobs[token]
            for token, known in facts.items()
            if not known.components and (ended_too or in_slurm[token].plan.attempt not in in_slurm[token].ended)
        }
        facts |= _query_accounts(unknown, slurm)
    return [_query_process(r) if is_local(r) else facts.get(r.plan.token, JobFacts(None, {})) for r in runs]


def _query_accounts(jobs: Mapping[str, JobId | None], slurm: Slurm) -> dict[str, JobFacts]:
    try:
        return {token: JobFacts(job, _components(rows)) for token, (job, rows) in _ask(slurm.accounting, jobs).items()}
    except ClusterError as e:
        return {token: JobFacts(job, {}, problem=str(e)) for token, job in jobs.items()}  # as above


Row = TypeVar("Row", QueueRow, AccountingRow)


def _ask(
    query: Callable[[Sequence[JobId]], list[Row] | None], jobs: Mapping[str, JobId | None]
) -> dict[str, tuple[JobId, list[Row]]]:
    """Rows of each job, by token. A query a cluster, since a job's number is unique in one only."""
    known = {token: job for token, job in jobs.items() if job is not None}
    answers = {}
    for cluster in {job.cluster for job in known.values()}:
        here = {token: job for token, job in known.items() if job.cluster == cluster}
        rows = query(sorted(set(here.values()))) or []
        for token, job in here.items():
            own = [row for row in rows if row.job_id.number == job.number and not _is_anothers(row, token)]
            answers[token] = (job, own)
    return answers


def _is_anothers(row: QueueRow | AccountingRow, token: str) -> bool:
    return isinstance(row, QueueRow) and is_anothers(row.comment, [token])


def is_local(records: Records) -> bool:
    """Whether the newest attempt was started by ``slime-hpc run``."""
    by = _started_by(records)
    return by is not None and by["job_id"] is None


def _started_by(records: Records) -> dict[str, Any] | None:
    """Who owns the newest attempt, or what was submitted for it; None where its submission was not recorded."""
    if records.plan.attempt in records.owners:
        return records.owners[records.plan.attempt]
    submitted = records.submitted
    return submitted if submitted is not None and submitted["attempt"] == records.plan.attempt else None


def _query_process(records: Records) -> JobFacts:
    assert records.submitted is not None
    host, pid = records.submitted["host"], records.submitted["pid"]
    process = f"process {pid} on {host}"
    if host != os.uname().nodename:
        return JobFacts(None, {}, problem=f"only {host}, where `slime-hpc run` was started, can tell", process=process)
    if identity(pid) != records.submitted["process"]:
        return JobFacts(None, {}, process=process)
    state = ComponentState(JobState("RUNNING"), "", records.submitted["submitted"], None)
    return JobFacts(None, {0: state}, process=process)


def recorded_job_id(records: Records) -> JobId | None:
    by = _started_by(records)
    if by is None or by["job_id"] is None:
        return None
    cluster = records.submitted["cluster"] if records.submitted is not None else None
    return JobId.parse(";".join(filter(None, (by["job_id"], cluster))))


def has_started_again(ended: Mapping[str, Any], leader: ComponentState | QueueRow) -> bool:
    """Whether a job runs anew whose last attempt has ended: the next one has no directory yet."""
    return leader.state.name == "RUNNING" and leader.start is not None and leader.start >= ended["ended"]


def find_job_id(records: Records, slurm: Slurm) -> JobId | None:
    return _find_job_ids([records.plan.token], slurm).get(records.plan.token)


def _find_job_ids(tokens: Sequence[str], slurm: Slurm) -> dict[str, JobId]:
    rows = slurm.find(*tokens) if tokens else []
    return {row.comment: row.job_id.leader for row in reversed(rows)}  # the first counts: later ones were refused


def _components(rows: Sequence[QueueRow | AccountingRow]) -> dict[int, ComponentState]:
    return {
        row.job_id.component: ComponentState(
            row.state, row.reason if isinstance(row, QueueRow) else "", row.start, row.end
        )
        for row in rows
        if row.job_id.component is not None  # sacct's bare row of a het job is transient, and wrong
    }
