"""A run that has ended → its next attempt, as a new job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_hpc.checkpoint import complete_checkpoints, may_begin_anew
from slime_hpc.errors import ClusterError, Finding, SlurmCommandError, UserError
from slime_hpc.plan import JobPlan, is_anothers, new_plan, read_plan
from slime_hpc.processes import identity
from slime_hpc.records import read_ended, read_owner, read_rounds, read_submit, surviving_rounds
from slime_hpc.render import render_script, supervisor_command
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.spec.load import reload_profile
from slime_hpc.spec.run import RunSpec
from slime_hpc.submit import (
    Entry,
    SubmitRecord,
    check_partitions,
    refusal,
    status_command,
    submit_attempt,
    withdraw,
    write_attempt,
)
from slime_hpc.types import JobId

FIXED = ("name", "run_dir", "seed", "model", "data")
"""Keys that make a run what it is; with another model or other data, what its checkpoints hold means nothing."""


def resume_run(
    run: RunDir, slurm: Slurm, entry: Entry, *, sets: Sequence[str] = (), flags: Sequence[str] = ()
) -> SubmitRecord:
    """Queue the next attempt of a run, which goes on from its newest checkpoint.

    UserError where the run has a job already, is finished, or has lost what it learned; ProfileError for a change
    that a run does not survive. Where Slurm refuses it, nothing is left behind.
    """
    last = _last_plan(run)
    run = _in_its_place(run, last)
    require_no_job(run, slurm)
    profile = reload_profile(last.spec, last.profile_dir, sets=sets, flags=flags)
    profile.require_none(changed_identity(last.spec, profile.spec))
    _require_something_to_do(run, profile.spec)
    plan = new_plan(profile, attempt=max(attempt.number for attempt in run.all_attempts()) + 1)
    profile.require_none(check_partitions(plan, slurm.partitions()))
    render_script(plan, supervisor_command(plan))  # refuses an sbatch option before anything is written
    return _submit(run, plan, slurm, entry)


def _last_plan(run: RunDir) -> JobPlan:
    plans = [attempt.plan for attempt in run.all_attempts() if attempt.plan.exists()]
    if not plans:
        raise UserError(f"{run.path} is not a run directory: it has no attempts/0001/plan.json")
    return read_plan(plans[-1])


def _in_its_place(run: RunDir, last: JobPlan) -> RunDir:
    """The run by the name that its records have; UserError where it no longer lies there."""
    made_as = RunDir(last.run_dir)
    if not (made_as.path.exists() and made_as.path.samefile(run.path)):
        link = shlex.join(["ln", "-s", str(run.path), str(made_as.path)])
        raise UserError(
            f"{run.path} was made as {made_as.path}, and its records name files there; move it back, or leave a link "
            f"there: {link}"
        )
    return made_as


def require_no_job(run: RunDir, slurm: Slurm) -> None:
    """UserError if Slurm has a job of this run that is not over; ClusterError if it cannot say."""
    tokens = [read_plan(attempt.plan).token for attempt in run.all_attempts() if attempt.plan.exists()]
    jobs = {*_recorded_jobs(run), *(row.job_id.leader for row in slurm.find(*tokens))}
    rows = slurm.queue(sorted(jobs)) if jobs else []
    alive = [row for row in rows if not row.state.is_over and not is_anothers(row.comment, tokens)]
    if alive:
        raise UserError(
            f"job {alive[0].job_id} of this run is {alive[0].state}, so there is nothing to resume: a run has one job "
            f"at a time. `{status_command(run)}` shows how it stands; end it first with `slime-hpc cancel` if it must"
            " go on in another way"
        )


def _recorded_jobs(run: RunDir) -> Iterator[JobId]:
    record = read_submit(run.submit)
    if record is not None:
        if record["job_id"] is None:
            _require_over(run, record)
        else:
            yield JobId.parse(";".join(filter(None, (record["job_id"], record["cluster"]))))
    for attempt in run.all_attempts():
        owner = read_owner(attempt.owner)
        if owner is not None and owner["job_id"] is not None:
            yield JobId.parse(owner["job_id"])


def _require_over(run: RunDir, record: Mapping[str, Any]) -> None:
    """UserError unless the process of a run without Slurm is known to be gone."""
    if record["host"] != os.uname().nodename and not run.attempt(record["attempt"]).ended.exists():
        raise UserError(
            f"only host {record['host']}, where this run was started, can tell whether it is over; go there"
        )
    if record["host"] == os.uname().nodename and identity(record["pid"]) == record["process"]:
        raise UserError(f"process {record['pid']} on this host still trains this run; end it with `slime-hpc cancel`")


def changed_identity(old: RunSpec, new: RunSpec) -> Iterator[Finding]:
    """What differs that may not."""
    for key in FIXED:
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            yield Finding(key, f"was {before!r} when the run began, now {after!r}: that is another run; submit it")


def _require_something_to_do(run: RunDir, spec: RunSpec) -> None:
    checkpoints = complete_checkpoints(run)
    trained = surviving_rounds(read_rounds(run.metrics))
    if not checkpoints and not may_begin_anew(run, trained, spec.checkpoint.interval):
        raise UserError(
            f"{len(trained)} rounds were trained, but {run.checkpoints} holds no complete checkpoint to go on from; "
            "submit to another run_dir, with a smaller checkpoint.interval"
        )
    done = checkpoints[-1].manifest.round + 1 if checkpoints else 0
    ends = [read_ended(attempt.ended) for attempt in run.all_attempts()]
    finished = [ended for ended in ends if ended is not None and ended["cause"] == "finished"]
    if finished and done >= spec.num_rollout:
        raise UserError(
            f"the run is finished: all {spec.num_rollout} rounds are trained, the model is in {run.model}. To train "
            f"on: slime-hpc resume {shlex.quote(str(run.path))} --set num_rollout={2 * spec.num_rollout}"
        )
    if done > spec.num_rollout:
        raise UserError(f"num_rollout={spec.num_rollout} is below the {done} rounds that the newest checkpoint holds")


def _submit(run: RunDir, plan: JobPlan, slurm: Slurm, entry: Entry) -> SubmitRecord:
    attempt = run.attempt(plan.attempt)
    try:
        write_attempt(run, plan)
        require_no_job(run, slurm)  # once more: another resume may have been quicker, and now sees this attempt
        return submit_attempt(run, plan, slurm, entry)
    except UserError:
        shutil.rmtree(attempt.path)
        raise
    except FileExistsError as error:
        raise UserError(f"attempt {plan.attempt} was made by somebody else just now; {status_command(run)}") from error
    except OSError as error:
        withdraw(run, plan, slurm, error)
        shutil.rmtree(attempt.path, ignore_errors=True)  # perhaps it could not even be made
        raise UserError(f"{attempt.path} cannot be written: {error.strerror}; make room, and try again") from error
    except SlurmCommandError as error:
        shutil.rmtree(attempt.path)
        raise refusal(error, plan) from error
    except ClusterError as error:
        hint = f"Its attempt is kept; `{status_command(run)}` tells whether there is a job."
        raise ClusterError(f"{error}\n{hint}") from error
