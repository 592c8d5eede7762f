"""Reports for people: rich tables that fit 80 columns. What is shown is decided elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slime_hpc.listing import Listing
from slime_hpc.plan import JobPlan, plan_warnings
from slime_hpc.spec.explain import show
from slime_hpc.spec.secrets import masked
from slime_hpc.spec.values import format_time
from slime_hpc.status import AttemptStatus, StatusReport

_COLOURS = {
    "ok": "green",
    "finished": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "cancelled": "yellow",
    "stalled": "red",
    "failed": "red",
    "unknown": "red",
}


def print_report(report: RenderableType) -> None:
    """To standard output; no colours where that is a file or a pipe. Only tables are made to fit the width.

    Text is left to the terminal to break, so that a path or a command in it can be copied.
    """
    console = Console(highlight=False)
    for part in _flat(report):
        console.print(part, soft_wrap=isinstance(part, Text))


def _flat(report: RenderableType) -> Iterator[RenderableType]:
    if isinstance(report, Group):
        for part in report.renderables:
            yield from _flat(part)
    else:
        yield report


def plan_report(plan: JobPlan) -> RenderableType:
    """The components of a job, what runs on them, and what it may cost."""
    table = Table("role", "partition", "account", box=None, pad_edge=False)
    for heading in ("nodes", "GPUs", "CPUs", "time limit"):
        table.add_column(heading, justify="right")
    for c in plan.components:
        account = str(c.options.get("account", "(default)"))
        sizes = (str(c.nodes), str(c.gpus_per_node), str(c.cpus_per_task), format_time(c.time_limit_s))
        table.add_row(str(c.role), c.partition, account, *sizes)
    sampling = plan.spec.sampling
    samples = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    return Group(
        Text(f"{plan.spec.name}: one heterogeneous job on {plan.cluster.name} (GPUs and CPUs are per node)"),
        table,
        Text(
            f"processes  {_count(plan.trainer_ranks, 'trainer rank')}, "
            f"{_count(plan.engines, 'engine')} of {_count(plan.spec.rollout.gpus_per_engine, 'GPU')}"
        ),
        Text(
            f"rounds     {plan.spec.num_rollout} of {sampling.rollout_batch_size} prompts × "
            f"{sampling.n_samples_per_prompt} samples = {samples}"
        ),
        Text(f"cost       at most {plan.max_gpu_hours:.2f} GPU-hours"),
        Text(f"run_dir    {plan.run_dir}"),
        *(Text(f"variable   {name}={show(value)}") for name, value in masked(plan.variables).items()),
        *(Text(f"warning: {warning}", style="yellow") for warning in plan_warnings(plan)),
    )


def status_report(report: StatusReport) -> RenderableType:
    """Verdict, reason and next step first; then the attempts."""
    colour = _COLOURS[report.verdict]
    parts: list[RenderableType] = [
        Text.assemble((report.verdict, f"bold {colour}"), f"  {report.name}: {report.why}"),
    ]
    if report.next_step:
        parts.append(Text(f"next: {report.next_step}"))
    if report.round is not None:
        reward = "" if report.reward is None else f", reward {report.reward:.3f}"
        parts.append(Text(f"{report.round + 1} of {report.num_rollout} rounds trained{reward}"))
    return Group(*parts, _attempts_table(report.attempts))


def run_report(
    status: StatusReport, rounds: Sequence[Mapping[str, Any]], data: RenderableType, paths: Mapping[str, object]
) -> RenderableType:
    """Status, a selection of rounds, the data, and where the results lie."""
    table = (rounds_table(rounds), "") if rounds else ()
    lines = "\n".join(f"{what:<14} {path}" for what, path in paths.items())
    return Group(status_report(status), "", *table, data, "", Text(lines))


def listing_report(listing: Listing) -> RenderableType:
    """A line a run, its path last and never broken; then what could not be seen."""
    rows = [["name", "state", "verdict", "rounds", "reward", "job", "last heard", "path"]]
    for run in listing.runs:
        trained = 0 if run.round is None else run.round + 1
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        rounds = f"{trained}/{run.num_rollout}"
        heard = _time(run.last_heard)
        rows.append([run.name, run.state, run.verdict, rounds, reward, run.job_id or "-", heard, run.run_dir])
    lines = _aligned(rows) if listing.runs else [Text("no run found")]
    for line, run in zip(lines[1:], listing.runs, strict=True):
        line.highlight_words([f" {run.verdict} "], _COLOURS[run.verdict])
    notes = [f"not looked at: {path}: {reason}" for path, reason in listing.unreadable.items()]
    if listing.slurm_problem:
        notes.append(f"Slurm could not be asked, so what its jobs do now is not known: {listing.slurm_problem}")
    return Group(*lines, *(Text(note, style="yellow") for note in notes))


def _aligned(rows: Sequence[Sequence[str]]) -> list[Text]:
    """In columns two spaces apart, whatever the terminal's width."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        Text("  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]


def rounds_table(rounds: Iterable[Mapping[str, Any]]) -> Table:
    """Rows of ``metrics.jsonl``: how it learns, and where the seconds go."""
    table = Table("round", box=None, pad_edge=False)
    for heading, _, _ in _ROUND_METRICS:
        table.add_column(heading, justify="right")
    for row in rounds:
        table.add_row(str(row["round"]), *(_metric(row, name, form) for _, name, form in _ROUND_METRICS))
    return table


def data_tables(prompts: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]]) -> RenderableType:
    """What was loaded and left out; and what was answered without training on it, with 95 % intervals."""
    loaded = Table("data", box=None, pad_edge=False)
    for heading in ("prompts", "left out as too long", "also in training"):
        loaded.add_column(heading, justify="right")
    for row in prompts:
        loaded.add_row(row["set"], *(str(row[name]) for name in ("prompts", "too_long", "also_in_training")))
    answered = Table("evaluation", box=None, pad_edge=False)
    for heading in ("rounds", "samples", "reward", "95 % interval"):
        answered.add_column(heading, justify="right")
    for e in evaluations:
        interval = "-" if e["interval"] is None else "{:.3f} to {:.3f}".format(*e["interval"])
        answered.add_row(e["name"], str(e["rounds"]), str(e["samples"]), f"{e['reward']:.3f}", interval)
    return Group(loaded, "", answered) if answered.rows else loaded


def _seconds(value: float) -> str:
    """Three digits, so that columns stay narrow."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}s"


_ROUND_METRICS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "rollout/raw_reward", "{:.3f}".format),
    ("lag", "rollout/weight_lag", "{:g}".format),
    ("grad norm", "train/grad_norm", "{:.2f}".format),
    ("logp diff", "train/train_rollout_logprob_abs_diff", "{:.1e}".format),
    ("rollout", "perf/rollout_time", _seconds),
    ("scoring", "perf/reward_time", _seconds),
    ("train", "perf/train_time", _seconds),
    ("sync", "perf/update_weights_time", _seconds),
    ("save", "perf/save_time", _seconds),
)


def _metric(row: Mapping[str, Any], name: str, form: Callable[[float], str]) -> str:
    return "-" if row.get(name) is None else form(row[name])


def _attempts_table(attempts: Iterable[AttemptStatus]) -> Table:
    table = Table("attempt", "job", "Slurm state", "started", "ended", "cause", box=None, pad_edge=False)
    table.add_column("GPU-hours", justify="right")
    for a in attempts:
        hours = "-" if a.gpu_hours is None else f"{a.gpu_hours:.2f}"
        table.add_row(
            str(a.number), a.job_id or "-", a.state or "-", _time(a.started), _time(a.ended), a.cause or "-", hours
        )
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
