"""One run over four nodes: a trainer of two ranks, two engines, one of which dies on the way."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster
from runs import TestRun, submit_quickstart

from slime_hpc.records import read_json, read_jsonl

pytestmark = pytest.mark.timeout(900)

TWO_BY_TWO = {
    "trainer.nodes": 2,
    "trainer.megatron.tensor_model_parallel_size": 2,
    "rollout.nodes": 2,
    "rollout.update_weight_buffer_size": 65536,  # several buckets of the tiny model
}
KILLED_AFTER_ROUND = 10


@pytest.fixture(scope="module")
def finished(devcluster: RunningDevCluster, model: Path) -> Iterator[TestRun]:
    """The quickstart with tensor parallelism 2 and two engines; engine 1 is killed in its first half."""
    directory = Path(tempfile.mkdtemp(prefix="slime-hpc-run-"))
    run = submit_quickstart(devcluster, directory, model, **TWO_BY_TWO)
    try:
        run.wait_until(lambda: len(run.rounds()) > KILLED_AFTER_ROUND, f"round {KILLED_AFTER_ROUND}", timeout_s=400)
        (victim,) = (row["pid"] for row in run.events("engine_started") if row["engine"] == "engine 1")
        os.kill(victim, signal.SIGKILL)
        run.require_finished(400)
        yield run
    finally:
        devcluster.run("scancel", run.job_id)
        shutil.rmtree(directory)


def test_ranks_and_engines_are_spread_over_the_nodes(finished: TestRun) -> None:
    nodes = read_json(finished.attempt.allocation)
    assert finished.events("trainer_ready")[0]["nodes"] == nodes["trainer"]
    started = {row["engine"]: row["node"] for row in finished.events("engine_started")}
    assert started == {"engine 0": nodes["rollout"][0], "engine 1": nodes["rollout"][1]}


def test_the_run_goes_on_without_the_dead_engine(finished: TestRun) -> None:
    (dropped,) = finished.events("engine_dropped")
    assert (dropped["engine"], dropped["left"]) == ("engine 1", 1)
    assert "SIGKILL" in dropped["detail"]
    status = finished.status()
    assert (status["state"], status["verdict"], status["round"]) == ("ended", "finished", 49)


def test_no_round_suffers(finished: TestRun) -> None:
    assert [row["round"] for row in finished.rounds()] == list(range(50))
    for number in range(50):
        samples = list(read_jsonl(finished.dir.rollout(number, 1)))
        assert len(samples) == 4 * 8
        assert {sample["weight_version"] for sample in samples} == {f"a1.v{number}"}
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in finished.rounds()) < 1e-5


def test_the_reward_climbs(finished: TestRun) -> None:
    rewards = [row["rollout/raw_reward"] for row in finished.rounds()]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert finished.events("finished")[0]["rollout/raw_reward"] > 0.9


def test_nothing_is_left_running(finished: TestRun) -> None:
    assert finished.leftovers() == []
