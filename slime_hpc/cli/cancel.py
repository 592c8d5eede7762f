"""``slime-hpc cancel``: end a run's job."""

from __future__ import annotations

import getpass
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slime_hpc.cli.arguments import JsonOption, RunArgument, print_json, run_directory

if TYPE_CHECKING:
    from slime_hpc.facts import Records
    from slime_hpc.slurm.commands import Slurm
    from slime_hpc.slurm.parse import QueueRow
    from slime_hpc.types import JobId


def cancel(run: RunArgument, as_json: JsonOption = False) -> None:
    """Cancel a run's job. A run that has ended stays as it is."""
    from slime_hpc.facts import read_records
    from slime_hpc.slurm.commands import SlurmCli

    records = read_records(run_directory(run))
    job_id, cancelled = cancel_run(records, SlurmCli())
    if as_json:
        print_json({"run_dir": str(records.run.path), "job_id": job_id and str(job_id), "cancelled": cancelled})
    elif cancelled:
        typer.echo(f"cancelled {f'job {job_id}' if job_id else 'the run'}; its processes end within a minute")
    else:
        typer.echo(f"{records.run.path} has ended already; nothing to cancel")


def cancel_run(records: Records, slurm: Slurm) -> tuple[JobId | None, bool]:
    """The run's job, and whether there was something to cancel. The marker tells the supervisor who wanted it."""
    from slime_hpc.errors import ClusterError
    from slime_hpc.facts import find_job_id, is_local, recorded_job_id
    from slime_hpc.plan import is_anothers

    if is_local(records):
        return None, _cancel_process(records, slurm)
    job_id = recorded_job_id(records) or find_job_id(records, slurm)
    if job_id is None:
        return None, False
    tokens = [plan.token for plan in records.plans]
    rows = [row for row in slurm.queue([job_id]) if not is_anothers(row.comment, tokens)]
    ended = records.ended.get(records.plan.attempt)
    if not any(_goes_on(row, ended) for row in rows):
        return job_id, False
    marker = _leave_marker(records)
    try:
        slurm.cancel(job_id)
    except ClusterError:
        marker.unlink(missing_ok=True)  # or a later end for another reason would be taken for this one
        raise
    return job_id, True


def _goes_on(row: QueueRow, ended: Mapping[str, Any] | None) -> bool:
    """Whether there is something to cancel; where the attempt has ended, only if Slurm starts the job again."""
    from slime_hpc.facts import has_started_again

    if row.state.is_over or ended is None:
        return not row.state.is_over
    return row.state.is_pending or has_started_again(ended, row)


def _leave_marker(records: Records) -> Path:
    from slime_hpc.records import write_json

    marker = records.run.attempt(records.plan.attempt).cancel_marker
    try:
        write_json(marker, {"time": time.time(), "user": _user()})
    except OSError as error:
        # a full disk is one reason to cancel: it goes on, and the run's record will not say who wanted it
        typer.echo(f"not recorded as cancelled by you: {marker}: {error.strerror}", err=True)
    return marker


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"  # which no passwd knows, as in some containers


def _cancel_process(records: Records, slurm: Slurm) -> bool:
    """Tell the supervisor of a run without Slurm to end it; UserError on another host."""
    from slime_hpc.errors import UserError
    from slime_hpc.facts import query_job

    facts = query_job(records, slurm)
    if records.plan.attempt in records.ended or not (facts.components or facts.problem):
        return False
    if facts.problem:
        raise UserError(f"{facts.process} cannot be ended from here; go to that host")
    assert records.submitted is not None
    _leave_marker(records)
    os.kill(records.submitted["pid"], signal.SIGTERM)
    return True
