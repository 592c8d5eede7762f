"""What came of a run, as a table's rows and a picture of its rewards."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_hpc.plan import JobPlan
from slime_hpc.records import read_jsonl, read_rounds, surviving_rounds
from slime_hpc.run_dir import RunDir
from slime_hpc.status import StatusReport

SUMMARY_ROWS = 8
MEAN_OF = 10
"""Rounds: one has few prompts, and their difficulty shows."""
SECRET_LENGTH = 8
"""Characters of the shortest value that is hidden; a shorter one is a switch, and stands in many a word."""


def load_rounds(run: RunDir) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, a round once: where it was repeated, the later attempt counts."""
    return surviving_rounds(read_rounds(run.metrics))


def column(rounds: Iterable[dict[str, Any]], name: str) -> list[float]:
    """One metric by round; NaN where a round has none, or none that is finite."""
    values = (row.get(name) for row in rounds)
    return [value if isinstance(value, int | float) and math.isfinite(value) else math.nan for value in values]


def running_means(values: Sequence[float]) -> list[float]:
    """Over the last MEAN_OF rounds, of those among them that have a value."""
    return [mean_of(values[max(0, i + 1 - MEAN_OF) : i + 1]) for i in range(len(values))]


def mean_of(values: Iterable[float]) -> float:
    """NaN where none of them is a number."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def summarise(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most SUMMARY_ROWS of the rounds, evenly spread, first and last among them."""
    last = len(rounds) - 1
    picked = {round(i * last / (SUMMARY_ROWS - 1)) for i in range(SUMMARY_ROWS)} if rounds else set()
    return [rounds[i] for i in sorted(picked)]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation set's answers after so many trained rounds."""

    name: str
    rounds: int
    reward: float
    """Mean over all samples."""
    samples: int
    interval: tuple[float, float] | None
    """95 % interval of the share that passed; None where rewards are not 0 or 1, or a prompt has several samples."""


def load_evaluations(run: RunDir) -> list[Evaluation]:
    """By set and rounds; where one was repeated, the later attempt counts."""
    found = {}
    for row in read_jsonl(run.events):
        if row.get("event") == "evaluated":
            independent = row["passed"] is not None and row["samples"] == row["prompts"]
            interval = wilson_interval(row["passed"], row["samples"]) if independent else None
            key = (row["set"], row["rounds"])
            found[key] = Evaluation(*key, row["reward"], row["samples"], interval)
    return [found[key] for key in sorted(found)]


def load_prompt_counts(run: RunDir) -> list[dict[str, Any]]:
    """By set of prompts, as the newest attempt loaded them: how many, how many too long, how many trained on too."""
    rows = {row["set"]: row for row in read_jsonl(run.events) if row.get("event") == "prompts_loaded"}
    names = ("set", "source", "prompts", "too_long", "also_in_training")
    return [{name: row[name] for name in names} for row in rows.values()]


def without_secrets(status: StatusReport, plans: Iterable[JobPlan]) -> StatusReport:
    """The same with nothing in its words that the profile's environment holds, nor a token: errors quote much."""
    values = {value for plan in plans for value in (plan.token, *plan.spec.environment.variables.values())}
    hidden = [value for value in values if len(value) >= SECRET_LENGTH and value not in status.run_dir]

    def hide(text: str | None) -> str | None:
        for value in sorted(hidden, key=len, reverse=True):
            text = text and text.replace(value, "(hidden)")
        return text

    attempts = tuple(dataclasses.replace(attempt, detail=hide(attempt.detail)) for attempt in status.attempts)
    return dataclasses.replace(status, why=hide(status.why) or "", attempts=attempts)


def wilson_interval(passed: int, total: int) -> tuple[float, float]:
    """95 % interval of a probability, from independent trials. Source: Wilson (1927), without continuity correction."""
    z = 1.959964
    share = passed / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def draw_reward_curve(run: RunDir, rounds: Sequence[dict[str, Any]]) -> None:
    """Mean reward by round, and over the last MEAN_OF rounds, to ``reward.png``."""
    import matplotlib

    matplotlib.use("Agg")  # compute and login nodes have no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    numbers, rewards = [row["round"] for row in rounds], column(rounds, "rollout/raw_reward")
    axes.plot(numbers, rewards, linewidth=1, alpha=0.4)
    means = running_means(rewards)
    axes.plot(numbers, means, color="C0", linewidth=2, label=f"mean of the last {MEAN_OF} rounds")
    axes.legend()
    axes.set_xlabel("round")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{run.path.name}: {means[0]:.3f} → {means[-1]:.3f}", parse_math=False)
    axes.grid(alpha=0.3)
    figure.savefig(run.reward_curve, dpi=120)
    pyplot.close(figure)
