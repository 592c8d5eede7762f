"""How a run stands: a pure join of what its directory holds and what Slurm says of its job."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from slime_hpc.errors import ClusterError, UserError
from slime_hpc.plan import JobPlan, is_anothers, read_plan
from slime_hpc.processes import is_running
from slime_hpc.records import last_round_row, read_ended, read_heartbeat, read_owner, read_submit
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.slurm.parse import AccountingRow, QueueRow
from slime_hpc.types import JobId, JobState

State = Literal["pending", "running", "stalled", "ended"]
Verdict = Literal["ok", "waiting", "stalled", "finished", "stopped", "cancelled", "failed", "unknown"]

STALLED_AFTER_S = 600.0
"""A running job whose driver has said nothing for this long is called stalled."""

_CAUSE_OF_STATE = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "FAILED": "crashed",
    "OUT_OF_MEMORY": "crashed",
}
_VERDICT_OF_CAUSE: dict[str, Verdict] = {
    "finished": "finished",
    "stopped": "stopped",
    "cancelled": "cancelled",
    "unknown": "unknown",
}
"""Every other cause is a failure."""

OUTPUT_LINES = 6
OUTPUT_CHARACTERS = 200
"""Of Slurm's output, where it has the last word."""

_NEVER_STARTS = {"PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount"}
"""Reasons that no waiting will cure."""


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


@dataclass(frozen=True)
class AttemptStatus:
    number: int
    job_id: str | None
    state: str | None
    """Slurm's word for the leader's state."""
    started: float | None
    ended: float | None
    cause: str | None
    detail: str | None
    gpu_hours: float | None


@dataclass(frozen=True)
class StatusReport:
    """What ``slime-hpc status`` shows; ``--json`` prints exactly these fields. Times are Unix seconds."""

    run_dir: str
    name: str
    state: State
    verdict: Verdict
    why: str
    next_step: str | None
    round: int | None
    num_rollout: int
    reward: float | None
    pending: dict[str, str]
    """Slurm's reason by role, while the job waits."""
    attempts: tuple[AttemptStatus, ...]


def load_status(run: RunDir, slurm: Slurm) -> StatusReport:
    """``look_at`` without the records."""
    return look_at(run, slurm)[1]


def look_at(run: RunDir, slurm: Slurm) -> tuple[Records, StatusReport]:
    """Ask Slurm, read the directory, join: what had ended when Slurm was asked has then left its record."""
    facts = query_job(read_records(run), slurm)
    records = read_records(run)
    return records, join_status(records, facts, now=time.time())


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
    if not is_running(pid, records.submitted["process_started"]):
        return JobFacts(None, {}, process=process)
    state = ComponentState(JobState("RUNNING"), "", records.submitted["submitted"], None)
    return JobFacts(None, {0: state}, process=process)


def recorded_job_id(records: Records) -> JobId | None:
    by = _started_by(records)
    if by is None or by["job_id"] is None:
        return None
    cluster = records.submitted["cluster"] if records.submitted is not None else None
    return JobId.parse(";".join(filter(None, (by["job_id"], cluster))))


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


def join_status(records: Records, job: JobFacts, now: float) -> StatusReport:
    """The report, from facts alone."""
    attempts = tuple(_attempt(records, plan, job, now) for plan in records.plans)
    last = records.last_round or {}
    state, verdict, why, next_step = _judge(records, job, attempts[-1], now)
    return StatusReport(
        run_dir=str(records.run.path),
        name=records.plan.spec.name,
        state=state,
        verdict=verdict,
        why=why,
        next_step=next_step,
        round=last.get("round"),
        num_rollout=records.plan.spec.num_rollout,
        reward=last.get("rollout/raw_reward"),
        pending=_pending_reasons(records.plan, job) if state == "pending" else {},
        attempts=attempts,
    )


def _attempt(records: Records, plan: JobPlan, job: JobFacts, now: float) -> AttemptStatus:
    ended = records.ended.get(plan.attempt)
    leader = job.components.get(0) if plan is records.plan else None
    blank = AttemptStatus(plan.attempt, _job_id(records, plan, job), None, None, None, None, None, None)
    if leader is not None and not job.process:
        blank = dataclasses.replace(blank, state=str(leader.state))
    if ended is not None:
        started, stop = ended["started"], ended["ended"]
        blank = dataclasses.replace(blank, cause=ended["cause"], detail=ended["detail"])
    elif leader is None or leader.state.is_pending:
        return blank  # a pending job's start is a forecast
    elif leader.state.is_over:
        started, stop = leader.start, leader.end
        cause, detail = _cause_by_slurm(records, job, leader)
        blank = dataclasses.replace(blank, cause=cause, detail=detail)
    else:
        started, stop = leader.start, None
    hours = None if started is None else plan.gpus * max(0.0, (stop or now) - started) / 3600
    return dataclasses.replace(blank, started=started, ended=stop, gpu_hours=hours)


def _job_id(records: Records, plan: JobPlan, job: JobFacts) -> str | None:
    if plan.attempt in records.owners:
        job_id: str | None = records.owners[plan.attempt]["job_id"]
        return job_id
    return str(job.job_id) if job.job_id and plan is records.plan else None


def _cause_by_slurm(records: Records, job: JobFacts, leader: ComponentState) -> tuple[str, str]:
    cause = _CAUSE_OF_STATE.get(leader.state.name, "unknown")
    detail = f"Slurm says {leader.state}; the supervisor left no record of its end"
    return cause, f"{detail}; {_last_words(records, job)}"


def _last_words(records: Records, job: JobFacts) -> str:
    """The end of Slurm's output, where a job that could not even start its supervisor says why."""
    output = records.run.slurm_output(str(job.job_id))
    if not output.exists():
        return f"Slurm's output {output} is not there"
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-OUTPUT_LINES:]
    if not lines:
        return f"Slurm's output {output} is empty"
    return "\n".join([f"the end of {output}:", *(f"  {line[:OUTPUT_CHARACTERS]}" for line in lines)])


Judgement = tuple[State, Verdict, str, str | None]


def _judge(records: Records, job: JobFacts, attempt: AttemptStatus, now: float) -> Judgement:
    path = shlex.quote(str(records.run.path))
    leader = job.components.get(0)
    if leader is not None and leader.state.is_pending and records.plan.attempt in records.owners:
        why = (
            f"Slurm has put job {job.job_id} back into the queue; it goes on from the newest checkpoint when it starts"
        )
        return "pending", "waiting", f"{why} ({leader.reason or 'no reason given'})", None
    if attempt.cause is not None:
        verdict = _VERDICT_OF_CAUSE.get(attempt.cause, "failed")
        return "ended", verdict, attempt.detail or attempt.cause, _next_step(verdict, path)
    if job.process and leader is None:
        why = job.problem or f"{job.process} is gone, and left no record of its end"
        state = _last_known(records) if job.problem else "ended"
        return state, "unknown", why, None if job.problem else _next_step("unknown", path)
    if job.problem:
        return _last_known(records), "unknown", f"Slurm could not be asked: {job.problem}", None
    if job.job_id is None and not job.process:
        number = records.plan.attempt
        why = f"no job of attempt {number} was recorded, and Slurm knows none with its token: it was never submitted"
        return "ended", "unknown", why, f"slime-hpc resume {path}" if number > 1 else f"remove {path} and submit again"
    if leader is None:
        words = _last_words(records, job)
        why = f"Slurm no longer knows job {job.job_id}, and the supervisor left no record of its end; {words}"
        return "ended", "unknown", why, _next_step("unknown", path)
    if leader.state.is_pending:
        return _judge_pending(records, job)
    if leader.state.is_running:
        return _judge_running(records, leader, now)
    return _last_known(records), "unknown", f"Slurm says {leader.state}, a state this version does not know", None


def _next_step(verdict: Verdict, path: str) -> str | None:
    return {
        "failed": f"slime-hpc logs {path}; once mended: slime-hpc resume {path}",
        "unknown": f"slime-hpc resume {path}, or look first: slime-hpc logs {path}",
        "cancelled": f"slime-hpc resume {path} goes on with it",
    }.get(verdict)


def _last_known(records: Records) -> State:
    return "running" if records.heartbeat else "pending"


def _pending_reasons(plan: JobPlan, job: JobFacts) -> dict[str, str]:
    return {
        str(component.role): job.components[component.index].reason
        for component in plan.components
        if component.index in job.components
    }


def _judge_pending(records: Records, job: JobFacts) -> Judgement:
    reasons = _pending_reasons(records.plan, job)
    told = ", ".join(f"{role} {reason}" for role, reason in reasons.items())
    bad = [role for role, reason in reasons.items() if reason in _NEVER_STARTS]
    if bad:
        why = f"job {job.job_id} cannot start as it is: Slurm's reason is {told}"
        cancel = f"slime-hpc cancel {shlex.quote(str(records.run.path))}"
        hint = f"`{cancel}`, mend {bad[0]} in the profile, submit to another run_dir"
        return "pending", "waiting", why, hint
    return "pending", "waiting", f"job {job.job_id} is in the queue: Slurm's reason is {told}", None


def _judge_running(records: Records, leader: ComponentState, now: float) -> Judgement:
    beat = records.heartbeat or {}
    heard = max(beat.get("time", 0.0), leader.start or 0.0)
    silence = f"{now - heard:.0f} s ago"
    if not beat:
        why = f"started {silence}, its driver has not reported yet"
    else:
        where = "" if beat["round"] is None else f"round {beat['round']} of {records.plan.spec.num_rollout}: "
        why = f"{where}{beat['phase']}, reported {silence}"
    if now - heard > STALLED_AFTER_S:
        return "stalled", "stalled", why, f"slime-hpc logs {shlex.quote(str(records.run.path))} driver"
    return "running", "ok", why, None
