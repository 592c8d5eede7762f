"""From the start of a run to its first optimizer step, against the start of its engine alone.

    python -m benchmarks.start MODEL_DIR

Ours is `slime-hpc run` of the smollm2 example with one round of two short answers: Ray, router, reward workers, trainer
and engine come up, weights are synced, the answers generated, the optimizer steps. The baseline is the same engine,
from the start of its process until it answers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engine import PROFILE, model_plan, running_engine
from benchmarks.pairs import alternate, table
from slime_hpc.records import last_round_row
from slime_hpc.run_dir import RunDir

SHORT = (
    "num_rollout=1",
    "eval={}",
    "sampling.rollout_batch_size=1",
    "sampling.n_samples_per_prompt=2",
    "sampling.rollout_max_response_len=2",
)
AFTER_THE_STEP = ("perf/update_weights_time", "perf/save_time")


class Runs:
    """Each call is a run in a directory of its own; seconds to its first step."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch
        self._count = 0

    def __call__(self) -> float:
        self._count += 1
        run_dir = self._scratch / f"run-{self._count}"
        sets = [f"model.hf_checkpoint={self._model.absolute()}", f"run_dir={run_dir}", *SHORT]
        began = time.time()
        subprocess.run(
            [Path(sys.executable).with_name("slime-hpc"), "run", PROFILE, *(f"--set={value}" for value in sets)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        row = last_round_row(RunDir(run_dir).metrics)
        assert row is not None
        return float(row["time"] - sum(row[phase] for phase in AFTER_THE_STEP)) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plan = model_plan(arguments.model, Path(scratch) / "engine")

        def engine_alone() -> float:
            with running_engine(plan) as engine:
                return engine.started_s

        runs = Runs(arguments.model, Path(scratch))
        print(table([alternate("start to first step; engine alone", "s", runs, engine_alone)]))


if __name__ == "__main__":
    main()
