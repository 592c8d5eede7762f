"""When a run may go on, with what changes, and from where."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from slime_hpc.checkpoint import Manifest, commit
from slime_hpc.cli.cancel import cancel_run
from slime_hpc.driver.start import find_start, first_round
from slime_hpc.errors import ClusterError, ProfileError, UserError
from slime_hpc.facts import read_records
from slime_hpc.plan import JobPlan, one_host_plan
from slime_hpc.records import EventLog, append_jsonl, read_json, read_jsonl, surviving_rounds, write_json
from slime_hpc.resume import resume_run
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.allocation import Allocation
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.spec.load import Profile
from slime_hpc.submit import begin_local_run, submit_run
from slime_hpc.supervisor.attempts import close_predecessors, own_attempt
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId, ShardReport

CONTENT = b"weights" * 1000


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def run(profile: Profile, slurm: FakeSlurm) -> RunDir:
    """Submitted; its job has failed."""
    submit_run(profile, slurm, supervise)
    slurm.set_state(JobId(1), "FAILED")
    return RunDir(profile.spec.run_dir)


def train(run: RunDir, *rounds: int, attempt: int = 1) -> None:
    for number in rounds:
        append_jsonl(run.metrics, {"attempt": attempt, "round": number, "step": number + 1})


def save(run: RunDir, round_: int, attempt: int = 1) -> Path:
    path = run.checkpoint(round_, attempt)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(CONTENT)
    shard = ShardReport("__0_0.distcp", len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT))
    commit(
        run,
        Manifest(
            attempt=attempt,
            round=round_,
            step=round_ + 1,
            weight_version=f"a{attempt}.v{round_ + 1}",
            data={},
            spec_fingerprint="f",
            shards=(shard,),
        ),
    )
    return path


def end(run: RunDir, cause: str) -> None:
    write_json(run.attempt(1).ended, {"attempt": 1, "cause": cause, "detail": "", "started": 0.0, "ended": 1.0})


def test_the_next_attempt_is_a_new_job_with_the_same_plan_but_for_what_is_asked(run: RunDir, slurm: FakeSlurm) -> None:
    train(run, 0, 1, 2)
    save(run, 1)
    record = resume_run(run, slurm, supervise, sets=["trainer.nodes=2", "time_limit=1:00:00"])
    assert (record.job_id, record.attempt) == ("3", 2)
    assert read_json(run.submit)["job_id"] == "3"
    first, second = (JobPlan.model_validate_json(run.attempt(n).plan.read_text()) for n in (1, 2))
    assert second.token != first.token and slurm.jobs[3].token == second.token
    changes = {"trainer": first.spec.trainer.model_copy(update={"nodes": 2}), "time_limit_s": 3600}
    assert second.spec == first.spec.model_copy(update=changes)
    assert second.profile_dir == first.profile_dir
    assert read_json(run.spec)["spec"]["trainer"]["nodes"] == 2
    (pickled,) = run.attempt(2).submitit.glob("3_submitted.pkl")
    assert pickle.loads(pickled.read_bytes()).args == (str(run.path), 2)


def test_the_profile_of_a_run_survives_unchanged(run: RunDir, slurm: FakeSlurm) -> None:
    """Every kind of value goes through the spec's JSON and back."""
    resume_run(run, slurm, supervise)
    first, second = (JobPlan.model_validate_json(run.attempt(n).plan.read_text()) for n in (1, 2))
    assert second.spec == first.spec
    assert [c.options for c in second.components] == [c.options for c in first.components]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "A_NEW_STATE"])
def test_a_run_has_one_job_at_a_time(run: RunDir, slurm: FakeSlurm, state: str) -> None:
    slurm.set_state(JobId(1), state)
    with pytest.raises(UserError, match=rf"job 1\+0 of this run is {state}"):
        resume_run(run, slurm, supervise)
    assert len(slurm.jobs) == 1


def test_a_run_begun_without_slurm_goes_on_as_a_job_once_its_process_is_gone(
    profile: Profile, slurm: FakeSlurm
) -> None:
    begin_local_run(profile, one_host_plan(profile, 2))
    run = RunDir(profile.spec.run_dir)
    own_attempt(run, 1, Allocation.of_one_host("here", 2))
    with pytest.raises(UserError, match="still trains this run"):
        resume_run(run, slurm, supervise)
    record = read_json(run.submit)
    write_json(run.submit, {**record, "host": "elsewhere"})
    with pytest.raises(UserError, match="only host elsewhere"):
        resume_run(run, slurm, supervise)
    write_json(run.submit, {**record, "process": "another boot/1"})
    resumed = resume_run(run, slurm, supervise)
    assert (resumed.attempt, resumed.job_id) == (2, "1")
    own_attempt(run, 2, Allocation(JobId(1), (), 0))
    close_predecessors(run, 2)
    assert "`slime-hpc run` on" in read_json(run.attempt(1).ended)["detail"]


def test_a_job_whose_id_was_never_recorded_counts(run: RunDir, slurm: FakeSlurm) -> None:
    run.submit.unlink()
    slurm.set_state(JobId(1), "RUNNING")
    with pytest.raises(UserError, match="is RUNNING"):
        resume_run(run, slurm, supervise)


@pytest.mark.parametrize(
    ("change", "key"),
    [("model.hf_checkpoint={other}", "model"), ("data.rollout_seed=7", "data"), ("seed=7", "seed"), ("name=x", "name")],
)
def test_what_makes_a_run_may_not_change(
    run: RunDir, slurm: FakeSlurm, profile: Profile, tmp_path: Path, change: str, key: str
) -> None:
    other = tmp_path / "other"
    profile.spec.model.hf_checkpoint.rename(other)
    other.joinpath("x").touch()
    profile.spec.model.hf_checkpoint.symlink_to(other)
    with pytest.raises(ProfileError, match=f"{key}: was .*that is another run"):
        resume_run(run, slurm, supervise, sets=[change.format(other=other)])
    assert len(slurm.jobs) == 1


def test_a_finished_run_has_nothing_to_resume_unless_it_is_to_be_longer(run: RunDir, slurm: FakeSlurm) -> None:
    train(run, *range(50))
    save(run, 49)
    end(run, "finished")
    with pytest.raises(UserError, match=r"all 50 rounds are trained.*--set num_rollout=100"):
        resume_run(run, slurm, supervise)
    assert resume_run(run, slurm, supervise, sets=["num_rollout=60"]).attempt == 2


def test_a_run_killed_between_its_last_save_and_its_export_is_resumed(run: RunDir, slurm: FakeSlurm) -> None:
    train(run, *range(50))
    save(run, 49)
    assert resume_run(run, slurm, supervise).attempt == 2


def test_fewer_rounds_than_are_trained(run: RunDir, slurm: FakeSlurm) -> None:
    train(run, *range(20))
    save(run, 19)
    with pytest.raises(UserError, match="num_rollout=10 is below the 20 rounds"):
        resume_run(run, slurm, supervise, sets=["num_rollout=10"])


def test_rounds_without_a_checkpoint_are_not_trained_anew(run: RunDir, slurm: FakeSlurm) -> None:
    train(run, 0, 1)
    with pytest.raises(UserError, match=r"2 rounds were trained, but .* holds no complete checkpoint"):
        resume_run(run, slurm, supervise, sets=["checkpoint.interval=1"])


def test_what_slurm_refuses_leaves_the_run_as_it_was(run: RunDir, slurm: FakeSlurm) -> None:
    with pytest.raises(ClusterError, match="Invalid account"):
        resume_run(run, slurm, supervise, sets=["account=nosuch"])
    assert [attempt.number for attempt in run.all_attempts()] == [1]
    assert resume_run(run, slurm, supervise).attempt == 2


def test_it_starts_at_zero_where_there_is_nothing_to_lose(run: RunDir) -> None:
    assert first_round(find_start(run, EventLog(run.events, attempt=2, who="driver"), None)) == 0


def test_it_goes_on_after_the_newest_sound_checkpoint(run: RunDir) -> None:
    log = EventLog(run.events, attempt=2, who="driver")
    train(run, *range(8))
    good, damaged = save(run, 1), save(run, 3)
    (damaged / "__0_0.distcp").write_bytes(CONTENT[:-1] + b"x")
    torn = run.checkpoint(5, 1)
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(CONTENT[:100])
    start = find_start(run, log, 2)
    assert start is not None and start.path == good and first_round(start) == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        good.name,
        f"{damaged.name}.damaged",
        f"{torn.name}.torn",
    ]
    rows = [(row["event"], row.get("lost")) for row in read_jsonl(run.events)]
    assert rows == [("checkpoint_set_aside", None), ("checkpoint_set_aside", None), ("resumes", 6)]


def test_it_ends_where_all_that_was_learned_is_lost(run: RunDir) -> None:
    train(run, 0, 1, 2)
    with pytest.raises(UserError, match="rounds 0-2 were trained, but no complete checkpoint"):
        find_start(run, EventLog(run.events, attempt=2, who="driver"), None)
    with pytest.raises(UserError, match="rounds 0-2 were trained"):
        find_start(run, EventLog(run.events, attempt=2, who="driver"), 2)


def test_it_begins_anew_where_no_more_is_lost_than_between_two_checkpoints(run: RunDir, slurm: FakeSlurm) -> None:
    """Killed after the record of the round that the first checkpoint was to hold."""
    log = EventLog(run.events, attempt=2, who="driver")
    train(run, 0, 1, 2)
    assert find_start(run, log, 3) is None
    assert [(row["event"], row["lost"]) for row in read_jsonl(run.events)] == [("begins_anew", 3)]
    assert resume_run(run, slurm, supervise, sets=["checkpoint.interval=3"]).attempt == 2
    (save(run, 2, attempt=2) / "__0_0.distcp").write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(UserError, match="rounds 0-2 were trained"):
        find_start(run, log, 3)


def test_an_attempt_that_was_overtaken_no_longer_counts() -> None:
    rows = [{"attempt": a, "round": r} for a, r in [(1, 0), (1, 1), (2, 1), (2, 2), (1, 2), (2, 3)]]
    assert [(row["attempt"], row["round"]) for row in surviving_rounds(rows)] == [(1, 0), (2, 1), (2, 2), (2, 3)]


def test_another_runs_job_of_the_same_number_is_left_alone(run: RunDir, slurm: FakeSlurm) -> None:
    """A cluster that is set up afresh counts from 1 again."""
    slurm.set_state(JobId(1), "PENDING")
    slurm.jobs[1].token = "slime-another"
    records = read_records(run)
    assert cancel_run(records, slurm)[1] is False and slurm.jobs[1].components[0].state.is_pending
    assert resume_run(run, slurm, supervise).attempt == 2


def test_of_two_resumes_at_once_one_goes_on(run: RunDir, slurm: FakeSlurm) -> None:
    class Overtaken:
        """Another resume comes in after the first look at the queue."""

        looks = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(slurm, name)

        def queue(self, job_ids: Sequence[JobId]) -> list[QueueRow]:
            self.looks += 1
            rows = slurm.queue(job_ids)
            if self.looks == 1:
                resume_run(run, slurm, supervise)
            return rows

    slurm.set_state(JobId(1), "FAILED")
    with pytest.raises(UserError, match="a run has one job at a time"):
        resume_run(run, Overtaken(), supervise)
    assert [attempt.number for attempt in run.all_attempts()] == [1, 2]


def test_a_repeated_round_replaces_what_came_after_it_too() -> None:
    rows = [{"attempt": a, "round": r} for a, r in [(1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (3, 2), (3, 3)]]
    assert [(row["attempt"], row["round"]) for row in surviving_rounds(rows)] == [(1, 0), (1, 1), (3, 2), (3, 3)]
