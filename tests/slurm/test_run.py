"""The whole product, for real: one het job trains the quickstart's policy; then runs that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster
from runs import TestRun, slime_hpc, submit_quickstart, wait_for

from slime_hpc.checkpoint import find_newest_complete, verify
from slime_hpc.records import read_json, read_jsonl

pytestmark = pytest.mark.timeout(600)

START_TO_END_S = 400
DEATH_TO_END_S = 60


@pytest.fixture(scope="module")
def finished(devcluster: RunningDevCluster, model: Path) -> Iterator[TestRun]:
    """The quickstart as it is shipped, in a directory with a space in its name."""
    directory = Path(tempfile.mkdtemp(prefix="slime hpc run "))
    run = submit_quickstart(devcluster, directory, model)
    run.require_finished(START_TO_END_S)
    yield run
    shutil.rmtree(directory)


def test_it_finishes_and_sacct_shows_one_job_over_two_partitions(
    finished: TestRun, devcluster: RunningDevCluster
) -> None:
    def rows() -> list[str] | None:
        fields = ("-X", "-n", "-P", "-o", "JobID,Partition,State,ExitCode")
        found = sorted(devcluster.run("sacct", "-j", finished.job_id, *fields).stdout.split())
        return found if len(found) == 2 and all("COMPLETED" in row for row in found) else None

    job = finished.job_id
    assert wait_for(rows, 60, "both components in sacct") == [
        f"{job}+0|train|COMPLETED|0:0",
        f"{job}+1|rollout|COMPLETED|0:0",
    ]
    status = finished.status()
    assert (status["state"], status["verdict"], status["round"]) == ("ended", "finished", 49)
    assert [(a["number"], a["job_id"], a["cause"]) for a in status["attempts"]] == [(1, job, "finished")]


def test_the_reward_climbs(finished: TestRun) -> None:
    rewards = [row["rollout/raw_reward"] for row in finished.rounds()]
    assert [row["round"] for row in finished.rounds()] == list(range(50))
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert finished.events("finished")[0]["rollout/raw_reward"] > 0.9


def test_trainer_and_engine_agree(finished: TestRun) -> None:
    """Also proves that weights arrive: after an update that did not, they would differ by far more."""
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in finished.rounds()) < 1e-5


def test_every_round_is_generated_by_the_newest_weights(finished: TestRun) -> None:
    for number in (0, 1, 49):
        samples = list(read_jsonl(finished.dir.rollout(number, 1)))
        assert len(samples) == 4 * 8
        assert {sample["weight_version"] for sample in samples} == {f"a1.v{number}"}


def test_the_model_answers_as_the_engine_did(finished: TestRun) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(finished.dir.model, dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert len(AutoTokenizer.from_pretrained(finished.dir.model)) == 512
    samples = list(read_jsonl(finished.dir.final_rollout(1)))
    assert len(samples) == 4 * 8
    for sample in samples:
        tokens = torch.tensor([sample["tokens"]])
        with torch.no_grad():
            scores = trained(tokens).logits[0, :-1].log_softmax(-1)
        log_probs = scores.gather(1, tokens[0, 1:, None])[-sample["response_length"] :, 0]
        assert (log_probs - torch.tensor(sample["rollout_log_probs"])).abs().max() < 1e-5


def test_the_last_round_is_a_complete_checkpoint(finished: TestRun) -> None:
    newest = find_newest_complete(finished.dir)
    assert newest is not None and newest.path == finished.dir.checkpoint(49, 1)
    verify(newest)


def test_secrets_stay_secret(finished: TestRun) -> None:
    attempt = finished.attempt
    secrets = [
        attempt.ray_token.read_text(),
        attempt.control_token.read_text(),
        *read_json(attempt.engine_keys).values(),
    ]
    assert all(len(secret) >= 32 for secret in secrets)
    assert {path.stat().st_mode & 0o077 for path in (attempt.secrets, *attempt.secrets.iterdir())} == {0}
    for path in finished.dir.path.rglob("*"):
        if path.is_file() and attempt.secrets not in path.parents:
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content], f"a secret stands in {path}"


def test_a_finished_run_leaves_nothing_running(finished: TestRun) -> None:
    assert finished.leftovers() == []


def test_its_directory_is_not_taken_twice(finished: TestRun, model: Path) -> None:
    profile = finished.dir.path.parent / "quickstart" / "profile.yaml"
    sets = (f"--set=run_dir={finished.dir.path}", f"--set=model.hf_checkpoint={model}")
    with pytest.raises(AssertionError, match=rf"was used by job {finished.job_id}, .*nothing in it was touched"):
        slime_hpc("submit", profile, *sets)
    assert read_json(finished.attempt.ended)["cause"] == "finished"


def engine_pid(run: TestRun) -> int:
    return int(run.events("engine_started")[0]["pid"])


def raylet_pid(run: TestRun, role: str) -> int:
    (node,) = read_json(run.attempt.allocation)[role]
    return int(read_json(run.attempt.node(node))["raylet"])


def driver_pid(run: TestRun) -> int:
    return int(read_json(run.attempt.driver_control)["pid"])


@pytest.fixture
def endless(devcluster: RunningDevCluster, model: Path) -> Iterator[TestRun]:
    """A run with more rounds than anybody will wait for."""
    directory = Path(tempfile.mkdtemp(prefix="slime-hpc-run-"))
    run = submit_quickstart(devcluster, directory, model, num_rollout=100_000)
    yield run
    devcluster.run("scancel", run.job_id)
    shutil.rmtree(directory)


@pytest.fixture
def starting(endless: TestRun) -> TestRun:
    """Its engine and trainer are loading."""
    endless.wait_until(lambda: bool(endless.events("engine_started")), "engine_started")
    return endless


@pytest.fixture
def connected(endless: TestRun) -> TestRun:
    """Its driver and all of its Ray are up."""

    def look() -> bool:
        return len(endless.events("raylet_up")) == 2 and bool(endless.events("driver_started"))

    endless.wait_until(look, "Ray and driver")
    return endless


@pytest.fixture
def running(endless: TestRun) -> TestRun:
    """It has trained a round."""
    endless.wait_until(lambda: bool(endless.rounds()), "round 0")
    return endless


def test_a_dead_engine_ends_the_attempt_and_is_named(running: TestRun) -> None:
    os.kill(engine_pid(running), signal.SIGKILL)
    check_failure(running, "crashed", "rollout", ("engine 0", "SIGKILL"))


def test_a_dead_rollout_raylet_ends_the_attempt_and_is_named(starting: TestRun) -> None:
    os.kill(raylet_pid(starting, "rollout"), signal.SIGKILL)
    check_failure(starting, "node_failure", "rollout", ("raylet",))


def test_the_head_node_takes_the_blame_for_its_raylet(starting: TestRun) -> None:
    """All of Ray goes with it, and the driver runs beside it: neither driver nor rollout is the culprit."""
    os.kill(raylet_pid(starting, "trainer"), signal.SIGKILL)
    check_failure(starting, "node_failure", "trainer", ("raylet",))


def test_a_dead_driver_is_named_by_the_supervisor(connected: TestRun) -> None:
    os.kill(driver_pid(connected), signal.SIGKILL)
    check_failure(connected, "crashed", "driver", ("driver", "SIGKILL"))


def check_failure(run: TestRun, cause: str, role: str, words: tuple[str, ...]) -> None:
    ended = run.wait_for_end(DEATH_TO_END_S)
    assert (ended["cause"], ended["role"], ended["exit_code"]) == (cause, role, 3)
    status = run.status()
    assert (status["state"], status["verdict"]) == ("ended", "failed")
    assert all(word in status["why"] for word in words), status["why"]
    assert run.leftovers() == []
    assert no_other_is_blamed(run, role)


def no_other_is_blamed(run: TestRun, role: str) -> bool:
    blamed = {row["role"] for row in run.events("attempt_failed")}
    alive = {row["role"] for row in run.events("node_alive")}
    if role != "rollout":
        return blamed <= {role}  # without the head, the rollout's raylet soon gives up too
    return blamed == {role} and alive == {"trainer"} and not run.events("node_silent")


def test_cancel(starting: TestRun) -> None:
    slime_hpc("cancel", starting.dir.path)
    ended = starting.wait_for_end(DEATH_TO_END_S)
    assert ended["cause"] == "cancelled"
    status = starting.status()
    assert (status["state"], status["verdict"]) == ("ended", "cancelled")
    assert "slime-hpc cancel" in status["why"]
    assert starting.leftovers() == []


def test_plain_scancel_is_told_from_a_crash(connected: TestRun, devcluster: RunningDevCluster) -> None:
    devcluster.run("scancel", connected.job_id)
    assert connected.wait_for_end(DEATH_TO_END_S)["cause"] == "cancelled"
    assert connected.leftovers() == []
