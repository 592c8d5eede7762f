"""Who owns a run when jobs are started again, resumed, or started twice by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_hpc.errors import UserError
from slime_hpc.plan import JobPlan
from slime_hpc.records import append_jsonl, read_json, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.allocation import Allocation, ComponentAllocation
from slime_hpc.spec.load import Profile
from slime_hpc.submit import submit_run
from slime_hpc.supervisor.attempts import close_predecessors, own_attempt
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


@pytest.fixture
def run(profile: Profile) -> RunDir:
    submit_run(profile, FakeSlurm(), supervise)
    return RunDir(profile.spec.run_dir)


def job(number: int, restarts: int = 0) -> Allocation:
    return Allocation(JobId(number), (ComponentAllocation(number, ("n1",)),), restarts)


def attempts(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.attempts.iterdir())


def test_the_first_start_takes_the_attempt_it_was_submitted_for(run: RunDir) -> None:
    assert own_attempt(run, 1, job(7)).attempt == 1
    owner = read_json(run.attempt(1).owner)
    assert (owner["job_id"], owner["restart_count"]) == ("7", 0)
    assert attempts(run) == ["0001"]


def test_a_requeued_job_makes_the_next_attempt_each_time(run: RunDir) -> None:
    first = own_attempt(run, 1, job(7))
    second = own_attempt(run, 1, job(7, restarts=1))
    third = own_attempt(run, 1, job(7, restarts=2))
    assert (second.attempt, third.attempt) == (2, 3)
    assert second == first.model_copy(update={"attempt": 2})
    assert JobPlan.model_validate_json(run.attempt(3).plan.read_text()) == third
    assert attempts(run) == ["0001", "0002", "0003"]
    assert run.attempt(3).secrets.stat().st_mode & 0o777 == 0o700


def test_what_an_interrupted_start_left_is_in_nobodys_way(run: RunDir) -> None:
    own_attempt(run, 1, job(7))
    (run.attempts / ".0002.7").mkdir()
    assert own_attempt(run, 1, job(7, restarts=1)).attempt == 2


@pytest.mark.parametrize(
    ("intruder", "words"),
    [
        (job(8), "attempt 1 belongs to job 7"),
        (job(8, restarts=3), "attempt 1 belongs to job 7"),
        (job(7), "attempt 1 has been started by it already"),
    ],
)
def test_a_second_start_ends(run: RunDir, intruder: Allocation, words: str) -> None:
    own_attempt(run, 1, job(7))
    with pytest.raises(UserError, match=words):
        own_attempt(run, 1, intruder)
    assert attempts(run) == ["0001"]


def test_a_job_that_waited_while_the_run_was_resumed_ends(run: RunDir, profile: Profile) -> None:
    resumed = run.attempt(2)
    resumed.path.mkdir()
    with pytest.raises(UserError, match="attempt 2 was submitted after it"):
        own_attempt(run, 1, job(7))
    write_json(resumed.owner, {"job_id": "9", "restart_count": 0, "host": "n1", "started": 0.0})
    with pytest.raises(UserError, match="attempt 2 belongs to job 9"):
        own_attempt(run, 1, job(7, restarts=1))


def test_a_cancelled_job_never_comes_back(run: RunDir) -> None:
    own_attempt(run, 1, job(7))
    write_json(run.attempt(1).cancel_marker, {"time": 0.0, "user": "ada"})
    with pytest.raises(UserError, match="ada has cancelled it"):
        own_attempt(run, 1, job(7, restarts=1))


def test_a_predecessor_without_a_last_word_gets_one(run: RunDir) -> None:
    own_attempt(run, 1, job(7))
    append_jsonl(run.metrics, {"attempt": 1, "round": 4})
    started = read_json(run.attempt(1).owner)["started"]
    write_json(run.heartbeat, {"time": started + 60, "attempt": 1, "phase": "train", "round": 5})
    own_attempt(run, 1, job(7, restarts=1))
    close_predecessors(run, 2)
    ended = read_json(run.attempt(1).ended)
    assert (ended["cause"], ended["round"], ended["ended"]) == ("unknown", 4, started + 60)
    assert not run.attempt(2).ended.exists()


def test_a_last_word_that_was_said_stands(run: RunDir, tmp_path: Path) -> None:
    own_attempt(run, 1, job(7))
    write_json(run.attempt(1).ended, {"cause": "preempted"})
    own_attempt(run, 1, job(7, restarts=1))
    close_predecessors(run, 2)
    assert read_json(run.attempt(1).ended) == {"cause": "preempted"}
