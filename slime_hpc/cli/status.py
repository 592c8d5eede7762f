"""``slime-hpc status``: how a run stands, and why."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from slime_hpc.cli.arguments import JsonOption, RunArgument, print_json, run_directory


def status(
    run: RunArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look on until the run ends; Ctrl-C leaves it running.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how a run stands, why, and what to do about it."""
    from slime_hpc.cli.watching import watch_to_the_end
    from slime_hpc.errors import UserError
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.status import load_status

    if watch and as_json:
        raise UserError("--watch shows a run to people; leave out --json, or --watch")
    if watch:
        watch_to_the_end(str(run_directory(run).path))
        return
    report = load_status(run_directory(run), SlurmCli())
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        from slime_hpc.display import print_report, status_report

        print_report(status_report(report))
