"""One run in three attempts: requeued by Slurm, then killed outright, then resumed with another tensor parallelism."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devclusters import RunningDevCluster
from runs import TestRun, slime_hpc, submit_quickstart, wait_for

from slime_hpc.checkpoint import complete_checkpoints
from slime_hpc.records import read_json, read_jsonl, surviving_rounds

pytestmark = pytest.mark.timeout(1200)

INTERVAL = 3
PROMPTS = 4
START_S = 480


def trained_by(run: TestRun, attempt: int) -> list[dict[str, Any]]:
    return [row for row in run.rounds() if row["attempt"] == attempt]


def wait_for_rounds(run: TestRun, attempt: int, count: int) -> None:
    """Of an attempt that must not end before."""

    def look() -> bool:
        ended = run.dir.attempt(attempt).ended
        assert not ended.exists(), f"attempt {attempt} ended early: {ended.read_text()}"
        return len(trained_by(run, attempt)) >= count

    wait_for(look, START_S, f"round {count} of attempt {attempt}")


def kill_everything(run: TestRun) -> None:
    """SIGKILL to all that the job has on its nodes, srun and slurmstepd too, until there is nothing left of it."""

    def look() -> bool:
        new = [pid for pid in run.cluster.traces().processes() if pid not in run.before]
        for pid in new:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went with another
        return not new

    wait_for(look, 30, "the end of all processes")


def is_over(run: TestRun, job_id: str) -> bool:
    states = run.cluster.run("squeue", "--noheader", "--format=%T", f"--jobs={job_id}").stdout.split()
    return not set(states) & {"RUNNING", "PENDING", "COMPLETING"}


@pytest.fixture(scope="module")
def resumed(devcluster: RunningDevCluster, model: Path) -> Iterator[TestRun]:
    directory = Path(tempfile.mkdtemp(prefix="slime-hpc-run-"))
    run = submit_quickstart(devcluster, directory, model, **{"checkpoint.interval": INTERVAL, "num_rollout": 100_000})
    jobs = [run.job_id]
    try:
        wait_for_rounds(run, 1, 5)
        done = devcluster.run("scontrol", "requeue", run.job_id)
        assert done.returncode == 0, done.stderr
        wait_for(run.dir.attempt(2).owner.exists, START_S, "attempt 2")
        wait_for_rounds(run, 2, 5)
        kill_everything(run)
        wait_for(lambda: is_over(run, run.job_id), 120, "the end of the job")
        rounds = surviving_rounds(run.rounds())[-1]["round"] + 4
        shape = ("trainer.nodes=2", "trainer.megatron.tensor_model_parallel_size=2", f"num_rollout={rounds}")
        slime_hpc("resume", run.dir.path, *(f"--set={change}" for change in shape))
        jobs.append(read_json(run.dir.submit)["job_id"])
        ended = run.dir.attempt(3).ended
        wait_for(ended.exists, START_S, "the end of attempt 3")
        assert read_json(ended)["cause"] == "finished", ended.read_text()
        yield run
    finally:
        devcluster.run("scancel", *jobs)
        shutil.rmtree(directory)


def test_each_attempt_goes_on_after_the_newest_checkpoint(resumed: TestRun) -> None:
    starts = {row["attempt"]: row for row in resumed.events("resumes")}
    assert sorted(starts) == [2, 3]
    for number, start in starts.items():
        last = [row["round"] for row in trained_by(resumed, number - 1)][-1]
        rounds = [row["round"] for row in trained_by(resumed, number)]
        assert start["round"] % INTERVAL == INTERVAL - 1 and 0 <= last - start["round"] <= INTERVAL
        assert rounds == list(range(start["round"] + 1, start["round"] + 1 + len(rounds)))
        assert start["lost"] == last - start["round"]
    surviving = surviving_rounds(resumed.rounds())
    assert [row["round"] for row in surviving] == list(range(len(surviving)))


def test_no_prompt_is_left_out_or_drawn_twice(resumed: TestRun) -> None:
    for row in surviving_rounds(resumed.rounds()):
        samples = list(read_jsonl(resumed.dir.rollout(row["round"], row["attempt"])))
        first = row["round"] * PROMPTS
        assert {sample["group_index"] for sample in samples} == set(range(first, first + PROMPTS))
        assert {sample["weight_version"] for sample in samples} == {f"a{row['attempt']}.v{row['round']}"}


def test_engines_serve_what_the_trainer_goes_on_with(resumed: TestRun) -> None:
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in resumed.rounds()) < 1e-5


def test_the_policy_keeps_what_it_learned(resumed: TestRun) -> None:
    """A policy that began anew would be back at 0.1; so would, soon, one whose optimizer forgot its moments."""
    for attempt in (2, 3):
        before = trained_by(resumed, attempt - 1)[-1]["rollout/raw_reward"]
        after = trained_by(resumed, attempt)[0]["rollout/raw_reward"]
        assert after > before - 0.2, (attempt, before, after)


def test_the_newest_checkpoint_is_of_the_new_shape(resumed: TestRun) -> None:
    newest = complete_checkpoints(resumed.dir)[-1].manifest
    assert (newest.attempt, newest.round) == (3, resumed.rounds()[-1]["round"])
    assert resumed.events("trainer_ready")[-1]["ranks"] == 2
    assert (resumed.dir.model / "model.safetensors").exists()


def test_status_tells_the_whole_story(resumed: TestRun) -> None:
    status = resumed.status()
    assert (status["state"], status["verdict"]) == ("ended", "finished")
    first, second, third = status["attempts"]
    assert first["job_id"] == second["job_id"] == resumed.job_id != third["job_id"]
    assert (second["cause"], third["cause"]) == ("unknown", "finished")
    assert second["started"] < second["ended"] < third["started"]


def test_a_finished_run_is_not_resumed(resumed: TestRun) -> None:
    with pytest.raises(AssertionError, match="the run is finished"):
        slime_hpc("resume", resumed.dir.path)


def test_nothing_is_left_running(resumed: TestRun) -> None:
    assert resumed.leftovers() == []
