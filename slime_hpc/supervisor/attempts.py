"""Which attempt a job starts: the one it was submitted for, or, started again by Slurm, a new one."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict
from typing import Any

from slime_hpc.errors import UserError
from slime_hpc.plan import JobPlan
from slime_hpc.records import (
    fsync_dir,
    read_heartbeat,
    read_json,
    read_owner,
    read_rounds,
    write_json,
    write_text_atomic,
)
from slime_hpc.render import write_environment
from slime_hpc.run_dir import AttemptDir, RunDir
from slime_hpc.slurm.allocation import Allocation
from slime_hpc.supervisor.cause import Cause, Ending


def own_attempt(run: RunDir, submitted_for: int, allocation: Allocation) -> JobPlan:
    """Make this job the owner of an attempt, and return its plan; UserError where the attempt or the run is another's.

    Of two supervisors one wins: link and rename hold on every shared file system, locks do not.
    """
    attempt = run.attempt(submitted_for)
    _require_newest_is_ours(run, submitted_for, allocation)
    if not attempt.owner.exists():
        _write_owner(attempt, allocation)
        return _read_plan(attempt)
    return _next_plan(run, allocation)


def _require_newest_is_ours(run: RunDir, submitted_for: int, allocation: Allocation) -> None:
    """A later submission (`resume`) or another job may have taken the run over while this one waited."""
    newest = run.all_attempts()[-1]
    owner = read_owner(newest.owner)
    if owner is None:
        if newest.number != submitted_for:
            raise _refusal(run, f"attempt {newest.number} was submitted after it")
        return
    if owner["job_id"] != allocation.job_text:
        raise _refusal(run, f"attempt {newest.number} belongs to job {owner['job_id']} on {owner['host']}")
    if owner["restart_count"] >= allocation.restart_count:
        raise _refusal(run, f"attempt {newest.number} has been started by it already, on {owner['host']}")


def _refusal(run: RunDir, reason: str) -> UserError:
    return UserError(
        f"this job starts nothing in {run.path}: {reason}. `slime-hpc status` shows how the run stands; an attempt is "
        "started once, `slime-hpc resume` makes another"
    )


def _owner(allocation: Allocation) -> dict[str, Any]:
    return {
        "job_id": allocation.job_text,
        "restart_count": allocation.restart_count,
        "host": os.uname().nodename,
        "started": time.time(),
    }


def _write_owner(attempt: AttemptDir, allocation: Allocation) -> None:
    """By a link, which appears with its content or not at all."""
    draft = attempt.path / f".owner.{allocation.job_id}.{allocation.restart_count}.{os.getpid()}"
    write_json(draft, _owner(allocation), mode=0o600)
    try:
        os.link(draft, attempt.owner)
    except FileExistsError as error:
        raise UserError(
            f"another process started attempt {attempt.number} at the same moment ({attempt.owner}); this one ends"
        ) from error
    finally:
        draft.unlink()


def _next_plan(run: RunDir, allocation: Allocation) -> JobPlan:
    """A new attempt of the same job. Made whole beside its place: one without plan or owner never shows."""
    newest = run.all_attempts()[-1]
    if newest.cancel_marker.exists():
        user = read_json(newest.cancel_marker)["user"]
        raise _refusal(run, f"{user} has cancelled it, and a cancelled job never comes back")
    plan = _read_plan(newest).model_copy(update={"attempt": newest.number + 1})
    attempt = run.attempt(plan.attempt)
    draft = AttemptDir(attempt.path.with_name(f".{attempt.path.name}.{allocation.job_id}"))
    shutil.rmtree(draft.path, ignore_errors=True)  # of a start that was killed right here
    for directory in (draft.path, draft.logs):
        directory.mkdir()
    draft.secrets.mkdir(mode=0o700)
    write_text_atomic(draft.plan, plan.model_dump_json(indent=2) + "\n", mode=0o600)
    write_environment(plan, draft.environment)
    write_json(draft.owner, _owner(allocation), mode=0o600)
    try:
        draft.path.rename(attempt.path)
    except OSError as error:
        raise UserError(f"another process made attempt {plan.attempt} at the same moment; this one ends") from error
    fsync_dir(run.attempts)
    return plan


def _read_plan(attempt: AttemptDir) -> JobPlan:
    return JobPlan.model_validate_json(attempt.plan.read_text(encoding="utf-8"))


def close_predecessors(run: RunDir, attempt: int) -> None:
    """Write ``ended.json`` for earlier attempts of which no process was left to do it."""
    for earlier in run.all_attempts():
        owner = read_owner(earlier.owner)
        if earlier.number >= attempt or earlier.ended.exists() or owner is None:
            continue
        who = f"job {owner['job_id']}" if owner["job_id"] else f"`slime-hpc run` on {owner['host']}"
        detail = f"{who} ended without a word; found when attempt {attempt} started"
        ending = asdict(Ending(Cause.UNKNOWN, detail))
        times = {"started": owner["started"], "ended": _last_sign_of_life(run, earlier, owner["started"])}
        round_ = last_round_of(run, earlier.number)
        write_json(earlier.ended, {"attempt": earlier.number, **ending, "round": round_, **times, "exit_code": None})


def last_round_of(run: RunDir, attempt: int) -> int | None:
    """The last round that an attempt trained and recorded."""
    rounds = [row["round"] for row in read_rounds(run.metrics) if row["attempt"] == attempt]
    return rounds[-1] if rounds else None


def _last_sign_of_life(run: RunDir, attempt: AttemptDir, started: float) -> float:
    beat = read_heartbeat(run.heartbeat)
    return float(beat["time"]) if beat is not None and beat["attempt"] == attempt.number else started
