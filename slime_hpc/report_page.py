"""What came of a run as one HTML file: nothing is loaded from elsewhere, no script runs, every text is escaped."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from slime_hpc import __version__
from slime_hpc.report import MEAN_OF, Evaluation, column, mean_of
from slime_hpc.report_figures import draw_pictures
from slime_hpc.status import AttemptStatus, StatusReport

TEMPLATE = Path(__file__).with_name("report.html.j2")
DETAIL_CHARACTERS = 2000
"""Of what an attempt ended with; its logs have the rest."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class PageTable:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]


def render_page(
    status: StatusReport,
    rounds: Sequence[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    prompts: Iterable[Row],
    model: Path | None,
) -> str:
    """The whole text. ``status`` is printed as it is: secrets have to be out of it."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=True, finalize=_printable,
    )  # fmt: skip
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        status=status,
        facts=_facts(status, rounds, model),
        pictures=draw_pictures(rounds, evaluations),
        several_attempts=len({row["attempt"] for row in rounds}) > 1,
        tables=[_attempts(status.attempts, rounds), _evaluations(evaluations), _prompts(prompts)],
        written=_time(time.time()),
        zone=time.strftime("%Z"),
        version=__version__,
    )


def _printable(value: object) -> object:
    """Without what a browser or an encoder stumbles over: colours of a terminal, NUL, halves of characters."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def _facts(status: StatusReport, rounds: Sequence[dict[str, Any]], model: Path | None) -> dict[str, object]:
    hours = [attempt.gpu_hours for attempt in status.attempts if attempt.gpu_hours is not None]
    facts: dict[str, object] = {"rounds trained": f"{len(rounds)} of {status.num_rollout}"}
    facts["mean reward"] = _reward(column(rounds, "rollout/raw_reward"))
    facts["GPU-hours"] = f"{sum(hours):.2f}" if hours else "-"
    return facts | {"run directory": status.run_dir, "trained model": model or "none was exported"}


def _reward(rewards: Sequence[float]) -> str:
    if all(map(math.isnan, rewards)):
        return "-"
    if len(rewards) <= MEAN_OF:
        return f"{mean_of(rewards):.3f}"
    first, last = mean_of(rewards[:MEAN_OF]), mean_of(rewards[-MEAN_OF:])
    return f"{first:.3f} in the first {MEAN_OF} rounds, {last:.3f} in the last {MEAN_OF}"


def _attempts(attempts: Iterable[AttemptStatus], rounds: Iterable[Row]) -> PageTable:
    """Rounds are those that count: what a later attempt trained again is the later one's."""
    trained: dict[int, list[int]] = {}
    for row in rounds:
        trained.setdefault(row["attempt"], []).append(row["round"])
    rows = []
    for a in attempts:
        numbers = trained.get(a.number, [])
        span = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        hours = "-" if a.gpu_hours is None else f"{a.gpu_hours:.2f}"
        detail = (a.detail or "")[:DETAIL_CHARACTERS]
        rows.append((a.number, a.job_id or "-", _time(a.started), _time(a.ended), span, hours, a.cause or "-", detail))
    return PageTable(
        "Attempts", ("attempt", "job", "started", "ended", "rounds", "GPU-hours", "cause", "in words"), rows
    )


def _evaluations(evaluations: Iterable[Evaluation]) -> PageTable:
    rows = []
    for e in evaluations:
        interval = "-" if e.interval is None else "{:.3f} to {:.3f}".format(*e.interval)
        rows.append((e.name, e.rounds, e.samples, f"{e.reward:.3f}", interval))
    return PageTable("Evaluations", ("set", "rounds trained", "samples", "mean reward", "95 % interval"), rows)


def _prompts(prompts: Iterable[Row]) -> PageTable:
    names = ("set", "source", "prompts", "too_long", "also_in_training")
    rows = [[row[name] for name in names] for row in prompts]
    return PageTable("Prompts", ("set", "source", "used", "left out as too long", "also in training"), rows)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
