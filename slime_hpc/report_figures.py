"""Pictures of a run, round by round, for the HTML report. Line styles and hatches tell them apart without colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from slime_hpc.report import MEAN_OF, Evaluation, column, mean_of, running_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rounds = Sequence[dict[str, Any]]

WIDTH = 9.0
"""Inches; the same margins in all, so that a round stands at the same place in each."""
LEFT, RIGHT, TOP, BOTTOM = 1.0, 0.35, 0.1, 0.5
LEGEND = 0.3
PIXELS_PER_INCH = 144
MAX_BARS = 150
"""In the picture of times; each then stands for several rounds."""
MAX_JOINED = 600
"""Rounds that one line shows well; of more it shows means, before the rounds themselves in grey."""
MINUTES_FROM_S = 600.0
MARKERS = "osD^v*"
MIN_LABEL_DISTANCE = 0.04
"""Between numbers of attempts, as a share of the width."""


@dataclass(frozen=True)
class Picture:
    """One figure, with what a reader has to know about it."""

    title: str
    caption: str
    png: bytes


def draw_pictures(rounds: Rounds, evaluations: Sequence[Evaluation]) -> list[Picture]:
    """Of everything that at least one round has a number of."""
    if not rounds:
        return []
    drawn = (_reward(rounds, evaluations), _lag(rounds), _difference(rounds), _responses(rounds), _times(rounds))
    return [picture for picture in drawn if picture is not None]


def _reward(rounds: Rounds, evaluations: Sequence[Evaluation]) -> Picture | None:
    rewards = column(rounds, "rollout/raw_reward")
    last = rounds[-1]["round"] + 1
    evaluations = [
        e for e in evaluations if e.rounds <= last
    ]  # later ones are of rounds that a resume went back behind
    if not _any(rewards) and not evaluations:
        return None
    figure, (axes,) = _canvas(rounds, 3.2, above=LEGEND)
    _line(axes, rounds, rewards, color="0.62", linewidth=0.8, label="a round")
    _line(axes, rounds, running_means(rewards), color="black", linewidth=2, label=f"mean of the last {MEAN_OF} rounds")
    for i, name in enumerate(dict.fromkeys(e.name for e in evaluations)):
        _mark_evaluations(axes, [e for e in evaluations if e.name == name], i)
    axes.set_ylabel("mean reward")
    caption = "Mean reward of a round's samples."
    if evaluations:
        caption += (
            " Marks: what the policy then answered to an evaluation set, with its 95 % interval where it has one."
        )
    return _finish("Reward", caption + _gaps(rewards), figure)


def _mark_evaluations(axes: Axes, evaluations: Sequence[Evaluation], index: int) -> None:
    known = [e for e in evaluations if math.isfinite(e.reward)]
    below = [max(0.0, e.reward - e.interval[0]) if e.interval else math.nan for e in known]
    above = [max(0.0, e.interval[1] - e.reward) if e.interval else math.nan for e in known]
    axes.errorbar(
        [e.rounds for e in known], [e.reward for e in known], yerr=[below, above],
        marker=MARKERS[index % len(MARKERS)], markerfacecolor="white", markersize=7, capsize=4,
        color=f"C{index}", linestyle="--", linewidth=1, label=f"evaluation {evaluations[0].name}", clip_on=False,
    )  # fmt: skip


def _lag(rounds: Rounds) -> Picture | None:
    lags = column(rounds, "rollout/weight_lag")
    if not _any(lags):
        return None
    figure, (axes,) = _canvas(rounds, 1.6)
    _curve(axes, rounds, lags, drawstyle="steps-mid")
    axes.set_ylim(-0.1, max(1.1, 1.1 * max(value for value in lags if not math.isnan(value))))
    axes.locator_params(axis="y", integer=True)
    axes.set_ylabel("versions")
    caption = "How many versions the weights that made a round's samples were behind the trainer's; 0: on-policy."
    return _finish("Weight lag", caption + _notes(rounds, lags), figure)


def _difference(rounds: Rounds) -> Picture | None:
    name = "train/train_rollout_logprob_abs_diff"
    means, highest = column(rounds, name), column(rounds, f"{name}_max")
    if not _any(means):
        return None
    figure, (axes,) = _canvas(rounds, 2.4, above=LEGEND)
    if _any(highest):
        _line(axes, rounds, highest, color="0.5", linewidth=0.8, linestyle=":", label="largest of a round")
    _curve(axes, rounds, means, label="mean of a round")
    if any(value > 0 for value in means):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel("nats per token")
    caption = (
        "How far trainer and engine are apart on the log-probs of the same tokens. Rounding alone makes it small and"
        " steady; where it rises, what is trained is not what was sampled."
    )
    return _finish("Trainer and rollout log-probs: absolute difference", caption + _notes(rounds, means), figure)


def _responses(rounds: Rounds) -> Picture | None:
    lengths, truncated = column(rounds, "rollout/response_lengths"), column(rounds, "rollout/truncated_ratio")
    if not _any(lengths) and not _any(truncated):
        return None
    figure, (upper, lower) = _canvas(rounds, 1.8, 1.3)
    _curve(upper, rounds, lengths)
    upper.set_ylabel("length [tokens]")
    upper.set_ylim(bottom=0)
    _curve(lower, rounds, [100 * share for share in truncated])
    lower.set_ylabel("truncated [%]")
    lower.set_ylim(-3, 103)
    caption = (
        "Mean length of a round's responses, and the share of them that reached rollout_max_response_len and was cut."
    )
    return _finish("Responses", caption + _notes(rounds, lengths), figure)


PHASES: dict[str, tuple[str, str, str]] = {
    "rollout": ("rollout", "#a6cee3", ""),
    "reward": ("scoring", "#ffffff", "xxxx"),
    "train": ("training", "#08519c", ""),
    "update_weights": ("weight sync", "#fdd49e", "////"),
    "eval": ("evaluation", "#e0e0e0", "...."),
    "save": ("checkpoint", "#000000", ""),
}
"""Of a round, in their order: name, colour, hatch. Neighbours differ in lightness."""
REST = ("other", "#ffffff", "")


def _times(rounds: Rounds) -> Picture | None:
    phases = {phase: column(rounds, f"perf/{phase}_time") for phase in _phases_of(rounds)}
    if not any(_any(values) for values in phases.values()):
        return None
    size = _rounds_each(rounds, MAX_BARS)
    figure, (axes,) = _canvas(rounds, 3.2, above=LEGEND)
    edges = [rounds[0]["round"] + i * size - 0.5 for i in range(-(-_span(rounds) // size))]
    edges.append(rounds[-1]["round"] + 0.5)
    bars = {phase: _bars(rounds, values, edges) for phase, values in (phases | _rest(rounds, phases)).items()}
    tops = [0.0] * (len(edges) - 1)
    unit, seconds = ("min", 60.0) if max(map(sum, zip(*bars.values(), strict=True))) > MINUTES_FROM_S else ("s", 1.0)
    for phase, heights in bars.items():
        label, colour, hatch = PHASES.get(phase, REST if phase == "" else (phase, "#bdbdbd", "\\\\\\\\"))
        bottoms, tops = tops, [top + height / seconds for top, height in zip(tops, heights, strict=True)]
        axes.stairs(
            tops, edges, baseline=bottoms, fill=True, facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.3,
            label=label,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"time of a round [{unit}]")
    each = f" Each bar is the mean of {size} rounds." if size > 1 else ""
    return _finish("Time of a round, by phase", f"What a round's time is spent on, one above the other.{each}", figure)


def _phases_of(rounds: Rounds) -> list[str]:
    """Known ones in their order, then what a later version may have added."""
    names = {name for row in rounds for name in row if re.fullmatch(r"perf/.+_time", name)} - {"perf/step_time"}
    found = {name.removeprefix("perf/").removesuffix("_time") for name in names}
    return [phase for phase in PHASES if phase in found] + sorted(found - PHASES.keys())


def _rest(rounds: Rounds, phases: dict[str, list[float]]) -> dict[str, list[float]]:
    """What no phase accounts for."""
    told = [sum(value for value in values if not math.isnan(value)) for values in zip(*phases.values(), strict=True)]
    rest = [max(0.0, whole - part) for whole, part in zip(column(rounds, "perf/step_time"), told, strict=True)]
    return {"": rest} if sum(rest) > 0.01 * sum(told) else {}


def _bars(rounds: Rounds, values: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Mean over the rounds between two edges; a phase that a round did not have took it no time."""
    sums, counts = [0.0] * (len(edges) - 1), [0] * (len(edges) - 1)
    for row, value in zip(rounds, values, strict=True):
        i = int((row["round"] - edges[0]) // (edges[1] - edges[0]))
        sums[i] += 0.0 if math.isnan(value) else value
        counts[i] += 1
    return [total / max(1, count) for total, count in zip(sums, counts, strict=True)]


def _rounds_each(rounds: Rounds, most: int) -> int:
    """How many rounds one mark stands for, so that there are at most so many marks."""
    return -(-_span(rounds) // most)


def _span(rounds: Rounds) -> int:
    return int(rounds[-1]["round"] - rounds[0]["round"] + 1)


def _any(values: Sequence[float]) -> bool:
    return not all(map(math.isnan, values))


def _notes(rounds: Rounds, values: Sequence[float]) -> str:
    """What the caption of a curve has to add."""
    size = _rounds_each(rounds, MAX_JOINED)
    return (f" Black: means of {size} rounds; grey: each of them." if size > 1 else "") + _gaps(values)


def _gaps(values: Sequence[float]) -> str:
    count = sum(map(math.isnan, values))
    return f" {count} of {len(values)} rounds have no finite value, and leave a gap." if count else ""


def _canvas(rounds: Rounds, *heights: float, above: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Axes one above the other over the same rounds, with the attempts marked; so many inches above."""
    from matplotlib.figure import Figure

    top = TOP + above
    height = sum(heights) + top + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=PIXELS_PER_INCH)
    grid = {"left": LEFT / WIDTH, "right": 1 - RIGHT / WIDTH, "top": 1 - top / height, "bottom": BOTTOM / height}
    all_axes = figure.subplots(
        len(heights), sharex=True, squeeze=False, gridspec_kw={**grid, "hspace": 0.15}, height_ratios=heights
    )[:, 0]
    first, last = rounds[0]["round"], rounds[-1]["round"]
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.yaxis.set_label_coords(-0.8 / (WIDTH - LEFT - RIGHT), 0.5)
        axes.set_xlim(first - 0.5, last + 1)  # an evaluation may follow the last round
        axes.spines[["top", "right"]].set_visible(False)
        _mark_attempts(axes, rounds)
    all_axes[-1].locator_params(axis="x", integer=True)
    all_axes[-1].set_xlabel("round")
    return figure, list(all_axes)


def _mark_attempts(axes: Axes, rounds: Rounds) -> None:
    """A line where a later attempt went on, with its number as far as there is room."""
    labelled = -math.inf
    for before, after in pairwise(rounds):
        if before["attempt"] == after["attempt"]:
            continue
        x = after["round"] - 0.5
        axes.axvline(x, color="0.3", linewidth=1, linestyle=(0, (5, 3)))
        if x - labelled >= MIN_LABEL_DISTANCE * _span(rounds):
            axes.annotate(
                f"{after['attempt']}", (x, 1), (3, -2), xycoords=("data", "axes fraction"),
                textcoords="offset points", va="top", fontsize=8, bbox={"boxstyle": "square,pad=0.1", "fc": "white"},
            )  # fmt: skip
            labelled = x


def _curve(axes: Axes, rounds: Rounds, values: Sequence[float], **style: Any) -> None:
    """A black line, of means where there are many rounds."""
    style |= {"color": "black", "linewidth": 1.3}
    if len(rounds) <= MAX_JOINED:
        _line(axes, rounds, values, **style)
        return
    _line(axes, rounds, values, color="0.75", linewidth=0.5)
    size = _rounds_each(rounds, MAX_JOINED)
    middles = [{"round": rounds[i]["round"] + (size - 1) / 2} for i in range(0, len(rounds), size)]
    _line(axes, middles, [mean_of(values[i : i + size]) for i in range(0, len(rounds), size)], **style)


def _line(axes: Axes, rounds: Rounds, values: Sequence[float], **style: Any) -> None:
    """With gaps where there is no number; a point where a number has no neighbour to be joined to."""
    numbers = [row["round"] for row in rounds]
    axes.plot(numbers, values, **style)
    alone = [i for i in range(len(values)) if not _any([*values[max(0, i - 1) : i], *values[i + 1 : i + 2]])]
    axes.plot([numbers[i] for i in alone], [values[i] for i in alone], "o", markersize=4, color=style["color"])


def _finish(title: str, caption: str, figure: Figure) -> Picture:
    top = figure.axes[0]
    if top.get_legend_handles_labels()[0]:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
        top.legend(ncols=8, frameon=False, fontsize=9, **place)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return Picture(title, caption, file.getvalue())
