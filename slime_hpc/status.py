"""How a run stands: a pure join of what its directory holds and what Slurm says of its job."""

from __future__ import annotations

import dataclasses
import shlex
import time
from dataclasses import dataclass
from typing import Literal

from slime_hpc.facts import ComponentState, JobFacts, Records, has_started_again, query_job, read_records
from slime_hpc.plan import JobPlan
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm

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
    ended = records.ended.get(records.plan.attempt)
    if ended is not None and leader is not None and not job.process and has_started_again(ended, leader):
        why = f"Slurm has started job {job.job_id} again; attempt {records.plan.attempt + 1} is about to begin"
        return "running", "ok", why, None
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
