"""How much of a run's time nobody works: 1 − (rollout + train + sync + save) / wall, from its records alone.

python -m benchmarks.idle_share RUN_DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_hpc.records import read_jsonl
from slime_hpc.run_dir import RunDir

WORK = ("rollout", "train", "update_weights", "save")
"""Phases that count as work, by the name the loop gives them."""
OTHER = ("reward", "eval")
"""Phases that the formula counts as idle, shown by themselves."""


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of the wall time by phase; ``idle`` as the formula has it, ``between`` what belongs to no phase at all.

    Wall time is from a round's record to the next one's, so that writing them counts, too; the first round, before
    which there is no record, has its own ``perf/step_time``.
    """
    wall = rows[0]["perf/step_time"] + rows[-1]["time"] - rows[0]["time"]
    spent = {phase: sum(row.get(f"perf/{phase}_time", 0.0) for row in rows) / wall for phase in (*WORK, *OTHER)}
    idle = 1 - sum(spent[phase] for phase in WORK)
    return {**spent, "idle": idle, "between": idle - sum(spent[phase] for phase in OTHER)}


def main(run_dir: str) -> None:
    rows = list(read_jsonl(RunDir(Path(run_dir)).metrics))
    if not rows:
        sys.exit(f"{run_dir} has no trained round yet")
    if rows[-1]["attempt"] != 1:
        sys.exit(f"{run_dir} has several attempts: what went by between them is in no record of a round")
    print(f"{len(rows)} rounds")
    for phase, share in shares(rows).items():
        print(f"{phase:14} {100 * share:6.2f} %")


if __name__ == "__main__":
    main(sys.argv[1])
