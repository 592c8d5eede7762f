"""``slime-hpc export``: a checkpoint as a model for transformers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from slime_hpc.cli.arguments import JsonOption, RunArgument, run_directory


def export(
    run: RunArgument,
    round_: Annotated[int | None, typer.Option("--round", help="Of this round; left out, the newest.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Where to.",
            show_default="RUN/model, with --round RUN/model_round_…",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a checkpoint into a model that loads in transformers. One process does it, without a GPU."""
    from slime_hpc.facts import read_records
    from slime_hpc.render import in_environment

    directory = run_directory(run)
    plan = read_records(directory).plan.model_copy(update={"run_dir": directory.path})
    options = [] if round_ is None else [f"--round={round_}"]
    options += [] if output is None else [f"--output={output.absolute()}"]
    options += ["--json"] if as_json else []
    command = [plan.engine_python, "-m", "slime_hpc.driver.export", str(directory.path), *options]
    try:
        done = subprocess.run(in_environment(plan, command), check=False)
    except FileNotFoundError as error:
        from slime_hpc.errors import UserError

        raise UserError(
            f"{plan.engine_python}, the Python of this run, is not on this host; export on one that has it"
        ) from error
    if done.returncode:
        raise typer.Exit(done.returncode)
