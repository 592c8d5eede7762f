"""``slime-hpc resume``: go on with a run that has ended."""

from __future__ import annotations

import dataclasses
import shlex

import typer

from slime_hpc.cli.arguments import JsonOption, RunArgument, SetOption, name_what_is_left_out, print_json, run_directory


def resume(ctx: typer.Context, run: RunArgument, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Queue a run's next attempt, which goes on from its newest checkpoint; keys of its profile may be changed."""
    from slime_hpc.resume import resume_run
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.supervisor.main import supervise

    name_what_is_left_out()
    record = resume_run(run_directory(run), SlurmCli(), supervise, sets=set_ or (), flags=ctx.args)
    if as_json:
        print_json(dataclasses.asdict(record))
        return
    path = shlex.quote(record.run_dir)
    typer.echo(f"submitted job {record.job_id}, attempt {record.attempt}; how it stands: slime-hpc status {path}")
