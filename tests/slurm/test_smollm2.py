"""Two rounds of the example with a real language model: SmolLM2-135M-Instruct on sums."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster
from runs import EXAMPLES, TestRun, submit_example

from slime_hpc.records import read_jsonl

pytestmark = pytest.mark.timeout(900)

HELD_OUT = 16
ROUNDS = 2


@pytest.fixture(scope="module")
def finished(devcluster: RunningDevCluster) -> Iterator[TestRun]:
    directory = Path(tempfile.mkdtemp(prefix="slime-hpc-run-"))
    model = directory / "model"
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / "smollm2" / "make_model.py"), str(model)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    sets = {"num_rollout": ROUNDS, "eval.sets.0.reasoning_gym.size": HELD_OUT}
    run = submit_example("smollm2", devcluster, directory, model, **sets)
    try:
        run.require_finished(600)
        yield run
    finally:
        devcluster.run("scancel", run.job_id)
        shutil.rmtree(directory)


def test_trainer_and_engine_agree(finished: TestRun) -> None:
    """In float32, on every token; after round 0 also with weights that were trained and sent."""
    differences = [row["train/train_rollout_logprob_abs_diff_max"] for row in finished.rounds()]
    assert len(differences) == ROUNDS and 0 < max(differences) < 1e-4


def test_it_answers_what_it_was_asked(finished: TestRun) -> None:
    samples = [s for round_ in range(ROUNDS) for s in read_jsonl(finished.dir.rollout(round_, 1))]
    assert all(s["reward"] in (0.0, 1.0) for s in samples)
    assert all("arithmetic problem" in s["prompt"] and s["prompt"].startswith("<|im_start|>") for s in samples)
    assert {s["status"] for s in samples} <= {"completed", "truncated"}
    assert any(digit in s["response"] for s in samples for digit in "0123456789")


def test_held_out_sums_are_not_trained_on(finished: TestRun) -> None:
    before, after = (list(read_jsonl(finished.dir.evaluation("held_out", n, 1))) for n in (0, ROUNDS))
    trained = {s["prompt"] for round_ in range(ROUNDS) for s in read_jsonl(finished.dir.rollout(round_, 1))}
    assert 0 < len(before) == len(after) <= HELD_OUT
    assert not trained & {sample["prompt"] for sample in after}
    (source, held_out) = finished.events("prompts_loaded")
    assert (source["prompts"], held_out["prompts"]) == (400, len(after))
