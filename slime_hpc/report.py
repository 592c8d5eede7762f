"""What came of a run, as a table's rows and a picture of its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_hpc.errors import UserError
from slime_hpc.records import read_jsonl
from slime_hpc.run_dir import RunDir

SUMMARY_ROWS = 8


def load_rounds(run: RunDir) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, a round once: where it was repeated, the later attempt counts. UserError if none."""
    rounds = {row["round"]: row for row in read_jsonl(run.metrics)}
    if not rounds:
        raise UserError(f"{run.path} has no trained round yet; `slime-hpc status` tells how far the run is")
    return [rounds[number] for number in sorted(rounds)]


def summarise(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most SUMMARY_ROWS of the rounds, evenly spread, first and last among them."""
    last = len(rounds) - 1
    picked = {round(i * last / (SUMMARY_ROWS - 1)) for i in range(SUMMARY_ROWS)}
    return [rounds[i] for i in sorted(picked)]


def draw_reward_curve(run: RunDir, rounds: Sequence[dict[str, Any]]) -> None:
    """Mean reward by round, to ``reward.png``."""
    import matplotlib

    matplotlib.use("Agg")  # compute and login nodes have no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["round"] for row in rounds], [row["rollout/raw_reward"] for row in rounds], linewidth=2)
    axes.set_xlabel("round")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{run.path.name}: {rounds[0]['rollout/raw_reward']:.3f} → {rounds[-1]['rollout/raw_reward']:.3f}")
    axes.grid(alpha=0.3)
    figure.savefig(run.reward_curve, dpi=120)
    pyplot.close(figure)
