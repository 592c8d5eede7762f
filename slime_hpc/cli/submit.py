"""``slime-hpc submit``: queue a run."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from slime_hpc.cli.arguments import JsonOption, ProfileArgument, SetOption, load, name_what_is_left_out, print_json

if TYPE_CHECKING:
    from slime_hpc.spec.load import Profile


def submit(
    ctx: typer.Context,
    profile: ProfileArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, show the script, queue nothing.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look on until the run ends; Ctrl-C leaves it running.")
    ] = False,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a profile and queue its job."""
    from slime_hpc.cli.watching import watch_to_the_end
    from slime_hpc.errors import UserError
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.submit import submit_run
    from slime_hpc.supervisor.main import supervise

    if watch and (dry_run or as_json):
        raise UserError("--watch shows a run to people; leave out --dry-run and --json, or --watch")
    loaded = load(profile, set_, ctx.args)
    name_what_is_left_out()
    if dry_run:
        _show_dry_run(loaded, as_json)
        return
    record = submit_run(loaded, SlurmCli(), supervise)
    if as_json:
        print_json(dataclasses.asdict(record))
    else:
        typer.echo(f"submitted job {record.job_id}; how it stands: slime-hpc status {shlex.quote(record.run_dir)}")
    if watch:
        watch_to_the_end(record.run_dir)


def _show_dry_run(profile: Profile, as_json: bool) -> None:
    from slime_hpc.plan import shown_plan
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.submit import submit_dry_run

    found = submit_dry_run(profile, SlurmCli())
    if as_json:
        print_json({"plan": shown_plan(found.plan), "script": found.script, "unchecked": found.unchecked or None})
        return
    typer.echo(found.script, nl=False)
    said = f"not checked with Slurm: {found.unchecked}" if found.unchecked else "Slurm accepts it"
    typer.echo(f"dry run, nothing submitted; {said}", err=True)
