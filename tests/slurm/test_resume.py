"""One run in three attempts over up to four nodes: requeued by Slurm, killed outright, resumed in another shape.

The first two train with data parallelism 2 and one engine, the third with tensor parallelism 2 and two engines, of
which one dies on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster
from runs import TestRun, slime_hpc, submit_quickstart, wait_for

from slime_hpc.checkpoint import complete_checkpoints
from slime_hpc.records import read_json, read_jsonl, surviving_rounds

pytestmark = pytest.mark.timeout(1500)

INTERVAL = 3
PROMPTS, SAMPLES = 4, 8
START_S = 480
FIRST_SHAPE = {"trainer.nodes": 2, "trainer.megatron.use_distributed_optimizer": "true"}
OTHER_SHAPE = {
    "trainer.megatron.tensor_model_parallel_size": 2,
    "rollout.nodes": 2,
    "rollout.update_weight_buffer_size": 65536,  # several buckets of the tiny model
}


def kill_everything(run: TestRun) -> None:
    """SIGKILL to all that the job has on its nodes, srun too, until there is nothing left of it.

    Not to slurmstepd, which is Slurm's: without it Slurm hears of the end only minutes later.
    """

    def look() -> bool:
        there = run.cluster.traces().processes()
        new = [pid for pid, line in there.items() if pid not in run.before and not line.startswith("slurmstepd")]
        for pid in new:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went with another
        return not new

    wait_for(look, 30, "the end of all processes")


def is_over(run: TestRun) -> bool:
    states = run.cluster.run("squeue", "--noheader", "--format=%T", f"--jobs={run.job_id}").stdout.split()
    return not set(states) & {"RUNNING", "PENDING", "COMPLETING"}


def train(run: TestRun, rounds: int) -> None:
    run.wait_until(lambda: len(run.own_rounds()) >= rounds, f"round {rounds} of attempt {run.number}", START_S)


@pytest.fixture(scope="module")
def attempts(devcluster: RunningDevCluster, model: Path) -> Iterator[list[TestRun]]:
    """The run, as looked at in each of its attempts."""
    directory = Path(tempfile.mkdtemp(prefix="slime-hpc-run-"))
    settings = {"checkpoint.interval": INTERVAL, "num_rollout": 100_000, **FIRST_SHAPE}
    first = submit_quickstart(devcluster, directory, model, **settings)
    jobs = [first.job_id]
    try:
        train(first, 5)
        done = devcluster.run("scontrol", "requeue", first.job_id)
        assert done.returncode == 0, done.stderr
        second = dataclasses.replace(first, number=2)
        wait_for(second.attempt.owner.exists, START_S, "attempt 2")
        train(second, 5)
        kill_everything(second)
        wait_for(lambda: is_over(second), 120, "the end of the job")
        rounds = surviving_rounds(second.rounds())[-1]["round"] + 20
        changes = {"num_rollout": rounds, **OTHER_SHAPE}
        slime_hpc("resume", second.dir.path, *(f"--set={key}={value}" for key, value in changes.items()))
        third = dataclasses.replace(first, number=3, job_id=read_json(first.dir.submit)["job_id"])
        jobs.append(third.job_id)
        train(third, 5)
        (victim,) = (
            row["pid"] for row in third.events("engine_started") if (row["attempt"], row["engine"]) == (3, "engine 1")
        )
        os.kill(victim, signal.SIGKILL)
        third.require_finished(START_S)
        yield [first, second, third]
    finally:
        devcluster.run("scancel", *jobs)
        shutil.rmtree(directory)


@pytest.fixture
def resumed(attempts: list[TestRun]) -> TestRun:
    """In its last attempt."""
    return attempts[-1]


def test_each_attempt_goes_on_after_the_newest_checkpoint(attempts: list[TestRun]) -> None:
    starts = {row["attempt"]: row for row in attempts[-1].events("resumes")}
    assert sorted(starts) == [2, 3]
    for before, run in itertools.pairwise(attempts):
        start, last = starts[run.number], before.own_rounds()[-1]["round"]
        rounds = [row["round"] for row in run.own_rounds()]
        assert start["round"] % INTERVAL == 0 and start["lost"] == last + 1 - start["round"] < INTERVAL + 1
        assert rounds == list(range(start["round"], start["round"] + len(rounds)))
    surviving = surviving_rounds(attempts[-1].rounds())
    assert [row["round"] for row in surviving] == list(range(len(surviving)))


def test_no_prompt_is_left_out_or_drawn_twice(resumed: TestRun) -> None:
    for row in surviving_rounds(resumed.rounds()):
        samples = list(read_jsonl(resumed.dir.rollout(row["round"], row["attempt"])))
        first = row["round"] * PROMPTS
        assert len(samples) == PROMPTS * SAMPLES
        assert {sample["group_index"] for sample in samples} == set(range(first, first + PROMPTS))
        assert {sample["weight_version"] for sample in samples} == {f"a{row['attempt']}.v{row['round']}"}


def test_engines_serve_what_the_trainer_goes_on_with(resumed: TestRun) -> None:
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in resumed.rounds()) < 1e-5


def test_the_policy_keeps_what_it_learned(attempts: list[TestRun]) -> None:
    """A policy that began anew would be back at 0.1; so would, soon, one whose optimizer forgot its moments."""
    for earlier, later in itertools.pairwise(attempts):
        before = earlier.own_rounds()[-1]["rollout/raw_reward"]
        after = later.own_rounds()[0]["rollout/raw_reward"]
        assert after > before - 0.2, (later.number, before, after)


def test_ranks_and_engines_are_spread_over_the_nodes(attempts: list[TestRun]) -> None:
    for run, engines in zip(attempts, (1, 1, 2), strict=True):
        nodes = read_json(run.attempt.allocation)
        (ready,) = (row for row in run.events("trainer_ready") if row["attempt"] == run.number)
        assert (ready["ranks"], ready["nodes"]) == (2, nodes["trainer"])
        started = {r["engine"]: r["node"] for r in run.events("engine_started") if r["attempt"] == run.number}
        assert started == {f"engine {i}": nodes["rollout"][i] for i in range(engines)}


def test_the_run_goes_on_without_the_dead_engine(resumed: TestRun) -> None:
    (dropped,) = resumed.events("engine_dropped")
    assert (dropped["attempt"], dropped["engine"], dropped["left"]) == (3, "engine 1", 1)
    assert "SIGKILL" in dropped["detail"]


def test_the_newest_checkpoint_is_of_the_last_round(resumed: TestRun) -> None:
    newest = complete_checkpoints(resumed.dir)[-1].manifest
    assert (newest.attempt, newest.round) == (3, resumed.rounds()[-1]["round"])
    assert (resumed.dir.model / "model.safetensors").exists()


def test_status_tells_the_whole_story(attempts: list[TestRun]) -> None:
    status = attempts[-1].status()
    assert (status["state"], status["verdict"]) == ("ended", "finished")
    first, second, third = status["attempts"]
    assert [a["job_id"] for a in status["attempts"]] == [run.job_id for run in attempts]
    assert first["job_id"] != third["job_id"]
    assert (second["cause"], third["cause"]) == ("unknown", "finished")
    assert second["started"] < second["ended"] < third["started"]


def test_a_finished_run_is_not_resumed(resumed: TestRun) -> None:
    with pytest.raises(AssertionError, match="the run is finished"):
        slime_hpc("resume", resumed.dir.path)


def test_nothing_is_left_behind(resumed: TestRun) -> None:
    assert resumed.leftovers() == []
