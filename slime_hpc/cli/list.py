"""``slime-hpc list``: the runs under some directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from slime_hpc.cli.arguments import JsonOption, print_json


def list_(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Where to look, a few levels deep.", show_default="here"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the runs under some directories, the last heard of first."""
    from slime_hpc.listing import load_listing
    from slime_hpc.slurm.commands import SlurmCli

    listing = load_listing(directories or [Path()], SlurmCli())
    if as_json:
        print_json(dataclasses.asdict(listing))
    else:
        from slime_hpc.display import listing_report, print_report

        print_report(listing_report(listing))
