"""A checked profile → a run directory and a job: the one side effect between a profile and Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_hpc import __version__
from slime_hpc.errors import ClusterError, Finding, SlurmCommandError, UserError
from slime_hpc.plan import JobPlan, new_plan
from slime_hpc.processes import identity
from slime_hpc.records import read_submit, write_json, write_text_atomic
from slime_hpc.render import render_script, supervisor_command, write_environment
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.slurm.executor import HetJob, HetSlurmExecutor
from slime_hpc.slurm.parse import PartitionRow
from slime_hpc.spec.explain import did_you_mean
from slime_hpc.spec.load import Profile
from slime_hpc.spec.values import format_time
from slime_hpc.types import JobId

Entry = Callable[[str, int], None]
"""``slime_hpc.supervisor.main.supervise``: run directory and attempt."""


@dataclass(frozen=True)
class SubmitRecord:
    """What ``submit.json`` holds."""

    run_dir: str
    attempt: int
    job_id: str
    cluster: str | None
    """Where sbatch named one (multi-cluster submission)."""
    token: str
    submitted: float
    """Unix seconds."""
    tool_version: str = __version__


@dataclass(frozen=True)
class LocalRecord:
    """What ``submit.json`` holds for a run without Slurm."""

    run_dir: str
    attempt: int
    host: str
    pid: int
    """Of the supervisor."""
    process: str | None
    """``processes.identity``: another process may get the same pid later."""
    token: str
    submitted: float
    """Unix seconds."""
    job_id: None = None
    cluster: None = None
    tool_version: str = __version__


@dataclass(frozen=True)
class DryRun:
    """What would be submitted."""

    plan: JobPlan
    script: str
    unchecked: str
    """Why Slurm was not asked about it; empty where it was, and accepts it."""


def submit_dry_run(profile: Profile, slurm: Slurm) -> DryRun:
    """Everything ``submit_run`` does, short of writing and submitting."""
    require_free(RunDir(profile.spec.run_dir))
    plan = new_plan(profile)
    script = render_script(plan, supervisor_command(plan))
    try:
        profile.require_none(check_partitions(plan, slurm.partitions()))
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
            file.write(script)
            file.flush()
            slurm.check(Path(file.name))
    except SlurmCommandError as e:
        raise refusal(e, plan) from e
    except ClusterError as e:
        return DryRun(plan, script, unchecked=str(e))  # a laptop without Slurm may still look at the script
    return DryRun(plan, script, unchecked="")


def submit_run(profile: Profile, slurm: Slurm, entry: Entry) -> SubmitRecord:
    """Make the run directory and queue the job.

    Where Slurm refuses it, nothing is left behind. Where it cannot be told whether Slurm has it, the directory
    stays, and ``status`` finds the job by its token.
    """
    run = RunDir(profile.spec.run_dir)
    require_free(run)
    plan = new_plan(profile)
    profile.require_none(check_partitions(plan, slurm.partitions()))
    render_script(plan, supervisor_command(plan))  # refuses an sbatch option before anything is written
    made = _claim(run)
    try:
        write_text_atomic(run.profile, profile.text, mode=0o600)
        write_attempt(run, plan)
        return submit_attempt(run, plan, slurm, entry)
    except OSError as e:
        withdraw(run, plan, slurm, e)
        _undo(run, made)
        raise UserError(f"run_dir {run.path} cannot be written: {e.strerror}; choose another, or make room") from e
    except SlurmCommandError as e:
        _undo(run, made)
        raise refusal(e, plan) from e
    except ClusterError as e:
        hint = f"Its run directory is kept; `{status_command(run)}` tells whether there is a job."
        raise ClusterError(f"{e}\n{hint}") from e


def withdraw(run: RunDir, plan: JobPlan, slurm: Slurm, reason: OSError) -> None:
    """Cancel the job of an attempt that could not be written whole, if it was queued already.

    ClusterError, and nothing is to be removed, where Slurm cannot say or do it.
    """
    if not run.attempt(plan.attempt).script.exists():
        return  # sbatch comes after it
    try:
        for job_id in {row.job_id.leader for row in slurm.find(plan.token) if not row.state.is_over}:
            slurm.cancel(job_id)
    except ClusterError as e:
        raise ClusterError(
            f"{run.path} cannot be written: {reason.strerror}; and whether there is a job of it that must be cancelled "
            f"cannot be told: {e}\nMake room, then see `{status_command(run)}`"
        ) from e


def _write_record(run: RunDir, plan: JobPlan, job_id: JobId) -> SubmitRecord:
    """``submit.json`` and ``spec.json``, of the newest submission."""
    record = SubmitRecord(str(run.path), plan.attempt, str(job_id), job_id.cluster, plan.token, time.time())
    _write_spec(run, plan)
    write_json(run.submit, dataclasses.asdict(record))
    return record


def _write_spec(run: RunDir, plan: JobPlan) -> None:
    spec: dict[str, Any] = plan.spec.model_dump(mode="json")
    content = {"schema_version": plan.schema_version, "tool_version": plan.tool_version, "spec": spec}
    write_json(run.spec, content, mode=0o600)


def begin_local_run(profile: Profile, plan: JobPlan) -> None:
    """Make the run directory of a run that this very process will supervise."""
    run = RunDir(plan.run_dir)
    require_free(run)
    made = _claim(run)
    record = LocalRecord(
        run_dir=str(run.path),
        attempt=plan.attempt,
        host=os.uname().nodename,
        pid=os.getpid(),
        process=identity(os.getpid()),
        token=plan.token,
        submitted=time.time(),
    )
    try:
        write_text_atomic(run.profile, profile.text, mode=0o600)
        write_attempt(run, plan)
        _write_spec(run, plan)
        write_json(run.submit, dataclasses.asdict(record))
    except OSError as e:
        _undo(run, made)
        raise UserError(f"run_dir {run.path} cannot be written: {e.strerror}; choose another, or make room") from e


def check_partitions(plan: JobPlan, partitions: Sequence[PartitionRow]) -> Iterator[Finding]:
    """Is each component within what Slurm says of its partition? It may accept what then waits for ever."""
    known = {row.name: row for row in partitions}
    for component in plan.components:
        key, row = str(component.role), known.get(component.partition)
        if row is None:
            hint = did_you_mean(component.partition, known)
            yield Finding(f"{key}.partition", f"Slurm has no partition {component.partition!r} here{hint}")
            continue
        nodes = row.total_nodes if row.max_nodes is None else min(row.max_nodes, row.total_nodes)
        if component.nodes > nodes:
            yield Finding(f"{key}.nodes", f"{component.nodes} is over the {nodes} that partition {row.name!r} allows")
        if row.max_time_s is not None and component.time_limit_s > row.max_time_s:
            asked, limit = format_time(component.time_limit_s), format_time(row.max_time_s)
            yield Finding(f"{key}.time_limit", f"{asked} is over the {limit} that partition {row.name!r} allows")
        account = component.options.get("account")
        if account is not None and row.allow_accounts != "ALL" and account not in row.allow_accounts.split(","):
            yield Finding(f"{key}.account", f"{account!r} may not use partition {row.name!r}, {row.allow_accounts} may")


def require_free(run: RunDir) -> None:
    """UserError where something is in the run directory already."""
    if not run.path.exists():
        return
    if not run.path.is_dir():
        raise UserError(f"run_dir {run.path} is a file; choose another")
    if any(attempt.plan.exists() for attempt in run.all_attempts()) or run.submit.exists():
        raise _in_use(run)
    if run.attempts.exists():
        raise UserError(
            f"run_dir {run.path} is left of a submission that was cut short before it had a plan: there is no job of "
            "it; remove the directory, and submit again"
        )
    found = sorted(path.name for path in run.path.iterdir())
    if found:
        raise UserError(
            f"run_dir {run.path} is not empty (it holds {', '.join(found[:3])}{', …' if found[3:] else ''}), and is no "
            "run of slime-hpc's; nothing in it was touched. Choose a new or empty directory"
        )


def status_command(run: RunDir) -> str:
    return f"slime-hpc status {shlex.quote(str(run.path))}"


def _in_use(run: RunDir) -> UserError:
    owner = "a run whose job was not recorded"
    record = read_submit(run.submit)
    if record is not None:
        when = datetime.datetime.fromtimestamp(record["submitted"]).strftime("%Y-%m-%d %H:%M")
        by = (
            f"job {record['job_id']}, submitted"
            if record["job_id"]
            else f"`slime-hpc run` on {record['host']}, started"
        )
        owner = f"{by} {when}"
    ended = [attempt for attempt in run.all_attempts() if attempt.ended.exists()]
    state = "was used by" if ended else "is in use by"
    return UserError(
        f"run_dir {run.path} {state} {owner}; nothing in it was touched. `{status_command(run)}` "
        f"shows how it stands, `slime-hpc resume {shlex.quote(str(run.path))}` goes on with it. For a new run choose "
        "another directory (run_dir in the profile, or --set run_dir=…)"
    )


def _claim(run: RunDir) -> list[Path]:
    """Make the directory ours; of two submissions at once one wins. Returns what was made, innermost first."""
    made = [path for path in (run.path, *run.path.parents) if not path.exists()]
    try:
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.attempts.mkdir()
        run.path.chmod(0o700)
    except FileExistsError as e:
        raise _in_use(run) from e
    except OSError as e:
        for path in (run.attempts, *made):
            with contextlib.suppress(OSError):  # it was not made
                path.rmdir()
        raise UserError(f"run_dir {run.path} cannot be made: {e.strerror}; choose another") from e
    return made


def write_attempt(run: RunDir, plan: JobPlan) -> None:
    """Its directory, plan and variables; FileExistsError where there is one of that number."""
    attempt = run.attempt(plan.attempt)
    attempt.path.mkdir()
    attempt.logs.mkdir()
    attempt.secrets.mkdir(mode=0o700)
    write_text_atomic(attempt.plan, plan.model_dump_json(indent=2) + "\n", mode=0o600)
    write_environment(plan, attempt.environment)


def submit_attempt(run: RunDir, plan: JobPlan, slurm: Slurm, entry: Entry) -> SubmitRecord:
    """Queue the job of an attempt that ``write_attempt`` wrote, and record it. OSError: see ``withdraw``."""
    attempt = run.attempt(plan.attempt)

    def script(command: str) -> str:
        text = render_script(plan, command)
        write_text_atomic(attempt.script, text)
        return text

    executor = HetSlurmExecutor(
        folder=attempt.submitit,
        components=[component.options for component in plan.components],
        slurm=slurm,
        script=script,
        output=run.slurm_output("%j"),
        token=plan.token,
        python=shlex.quote(plan.python),
    )
    job = executor.submit(entry, str(run.path), plan.attempt)
    assert isinstance(job, HetJob)
    return _write_record(run, plan, job.watcher.job(job.job_id))


def _undo(run: RunDir, made: Sequence[Path]) -> None:
    """Remove what ``_claim`` and the rest made. The directory was empty before, so all in it is ours."""
    for path in run.path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in made:
        if any(path.iterdir()):
            return  # a parent that somebody else has begun to use meanwhile
        path.rmdir()


def refusal(error: SlurmCommandError, plan: JobPlan) -> ClusterError:
    """Slurm's words, and what it was asked for."""
    asked = "\n".join(
        f"  {component.role}: " + " ".join(f"--{option}={value}" for option, value in component.options.items())
        for component in plan.components
    )
    return ClusterError(
        f"Slurm refused the job: {error.stderr}\nAsked for:\n{asked}\n"
        "Nothing was submitted and nothing is left behind: mend the profile and run the same command again "
        "(`sacctmgr show assoc user=$USER` lists accounts and qos you may use)"
    )
