"""``slime-hpc report``: what came of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from slime_hpc.cli.arguments import JsonOption, RunArgument, print_json, run_directory


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write the page.", show_default="RUN/report.html"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what came of a run, in a table, and write it with pictures as one HTML file."""
    from slime_hpc.display import data_tables, print_report, run_report
    from slime_hpc.records import write_text_atomic
    from slime_hpc.report import (
        draw_reward_curve,
        load_evaluations,
        load_prompt_counts,
        load_rounds,
        summarise,
        without_secrets,
    )
    from slime_hpc.report_page import render_page
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.status import look_at

    directory = run_directory(run)
    records, status = look_at(directory, SlurmCli())
    page = _page_file(output or directory.report_page)
    rounds, prompts, evaluations = load_rounds(directory), load_prompt_counts(directory), load_evaluations(directory)
    curve = directory.reward_curve if rounds else None
    if rounds:
        draw_reward_curve(directory, rounds)
    model = directory.model if directory.model.is_dir() else None
    shown = without_secrets(status, records.plans)
    write_text_atomic(page, render_page(shown, rounds, evaluations, prompts, model))
    answered = [dataclasses.asdict(evaluation) for evaluation in evaluations]
    if as_json:
        found = {"rounds": rounds, "prompts": prompts, "evaluations": answered}
        paths = {"page": str(page), "reward_curve": curve and str(curve), "model": model and str(model)}
        print_json({"status": dataclasses.asdict(status), **found, **paths})
    else:
        where = {"page": page, "reward curve": curve or "no round yet", "trained model": model or "none was exported"}
        print_report(run_report(status, summarise(rounds), data_tables(prompts, answered), where))


def _page_file(path: Path) -> Path:
    """UserError where no file can be written: found before anything is drawn."""
    from slime_hpc.errors import UserError

    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file in it, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a directory; make it, or name another file")
    return path.absolute()
