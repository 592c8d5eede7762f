"""HetSlurmExecutor on a Slurm in memory: states no real one can be brought into at will."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError, cloudpickle_dump

from slime_hpc.errors import ClusterError, UserError
from slime_hpc.slurm.directives import Options
from slime_hpc.slurm.executor import HetInfoWatcher, HetJob, HetSlurmExecutor
from slime_hpc.slurm.parse import AccountingRow, QueueRow
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId, JobState

COMPONENTS: list[Options] = [{"partition": "train", "time": "1:30:00"}, {"partition": "rollout", "time": 20}]


@pytest.fixture(autouse=True)
def no_waiting_for_slow_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HetJob, "_results_timeout_s", 0)


def submit(slurm: FakeSlurm, folder: Path, **kwargs: Any) -> tuple[HetJob[Any], JobId]:
    job = HetSlurmExecutor(folder, COMPONENTS, slurm=slurm, **kwargs).submit(print, "hello")
    assert isinstance(job, HetJob)
    return job, JobId.parse(job.job_id)


def state(job: HetJob[Any]) -> str:
    job.watcher.update()
    return job.state


def is_done(job: HetJob[Any]) -> bool:
    job.watcher.update()
    return job.done()


def test_the_script(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    executor = HetSlurmExecutor(tmp_path / "a b", COMPONENTS, slurm=slurm, python="/my python")
    executor.update_parameters(job_name="mine", setup=["module load cuda"])
    job = executor.submit(print, "hello")
    lines = slurm.jobs[int(job.job_id)].script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines.count("#SBATCH hetjob") == 1
    assert "#SBATCH --job-name=mine-rollout" in lines
    assert "#SBATCH --no-requeue" in lines
    assert not any("--signal" in line for line in lines)
    assert lines[-2] == "module load cuda"
    assert lines[-1] == (
        f"exec env SUBMITIT_EXECUTOR=slurm /my python -u -m submitit.core._submit {shlex.quote(str(tmp_path / 'a b'))}"
    )
    assert job.submission()._timeout_min == 90


def test_the_leaders_state_is_the_jobs(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    assert state(job) == "PENDING"
    slurm.set_state(job_id, "RUNNING")
    slurm.set_state(job_id, "CANCELLED", component=1)
    assert state(job) == "RUNNING"
    assert not job.done()
    slurm.set_state(job_id, "TIMEOUT", component=0)
    assert state(job) == "TIMEOUT"
    assert job.done()


def test_half_a_job_that_waits_to_start_again_is_not_done(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    slurm.set_state(job_id, "COMPLETED", component=1)
    assert state(job) == "PENDING"
    assert not is_done(job)


@pytest.mark.parametrize("name", ["PREEMPTED", "OUT_OF_MEMORY", "NODE_FAIL", "FAILED", "COMPLETED"])
def test_a_job_that_ended_without_a_result_raises(tmp_path: Path, name: str) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    slurm.set_state(job_id, name)
    with pytest.raises(UncompletedJobError, match=f"state: {name}"):
        job.result()
    assert isinstance(job.exception(), UncompletedJobError)


def test_an_unknown_state_is_shown_and_not_taken_for_the_end(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    slurm.set_state(job_id, "TELEPORTING")
    assert state(job) == "TELEPORTING"
    assert not is_done(job)


def test_accounting_answers_once_slurmctld_has_forgotten(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    slurm.set_state(job_id, "FAILED")
    slurm.jobs[job_id.number].forgotten = True
    assert state(job) == "FAILED"
    assert job.done()


def test_a_bare_accounting_row_gives_way_to_the_components(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    record = slurm.jobs[job_id.number]
    slurm.set_state(job_id, "FAILED")
    record.forgotten = True
    for bare_at in (0, 3):
        bare = type(record.components[0])(job_id, job_id.number, JobState("COMPLETED"))
        record.components.insert(bare_at, bare)
        job.watcher.clear()
        assert state(job) == "FAILED"
        record.components.remove(bare)


@pytest.mark.parametrize("has_accounting", [True, False])
def test_a_job_nobody_knows_is_over_after_a_while(tmp_path: Path, has_accounting: bool) -> None:
    slurm = FakeSlurm(has_accounting=has_accounting)
    job, job_id = submit(slurm, tmp_path)
    slurm.set_state(job_id, "RUNNING")  # all that accounting will ever say of it
    slurm.jobs[job_id.number].forgotten = True
    assert not is_done(job)
    job.watcher.gone_after_s = 0
    assert is_done(job)
    with pytest.raises(UncompletedJobError, match="state: UNKNOWN"):
        job.result()


class SilentSlurm(FakeSlurm):
    silent = False

    def queue(self, job_ids: Any) -> list[QueueRow]:
        if self.silent:
            raise ClusterError("squeue did not answer within 60 s")
        return super().queue(job_ids)


def test_for_want_of_an_answer_no_job_is_over(tmp_path: Path) -> None:
    slurm = SilentSlurm()
    job, job_id = submit(slurm, tmp_path)
    job.watcher.gone_after_s = 0
    slurm.set_state(job_id, "FAILED")
    slurm.silent = True
    assert not is_done(job)
    slurm.silent = False
    assert is_done(job)


def test_an_accounting_that_is_down_does_not_keep_a_job_alive(tmp_path: Path) -> None:
    class BrokenAccounting(FakeSlurm):
        def accounting(self, job_ids: Any) -> list[AccountingRow] | None:
            raise ClusterError("sacct: Connection refused")

    slurm = BrokenAccounting()
    job, job_id = submit(slurm, tmp_path)
    job.watcher.gone_after_s = 0
    slurm.jobs[job_id.number].forgotten = True
    assert is_done(job)
    assert job.state == "UNKNOWN"


def test_a_result_is_a_result_whatever_slurm_says(tmp_path: Path) -> None:
    job, _ = submit(FakeSlurm(), tmp_path)
    cloudpickle_dump(("success", 42), job.paths.result_pickle)
    assert job.result() == 42
    assert state(job) == "PENDING"


def test_signals_go_to_the_batch_shell_and_cancel_to_the_whole_job(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    job, job_id = submit(slurm, tmp_path)
    job._interrupt()
    assert slurm.jobs[job_id.number].signals == [("TERM", True), ("USR2", True)]
    job.cancel()
    assert {str(part.state) for part in slurm.jobs[job_id.number].components} == {"CANCELLED"}


def test_executors_do_not_share_a_watcher_or_a_seam(tmp_path: Path) -> None:
    slurms = [FakeSlurm(), FakeSlurm()]
    jobs = [submit(slurm, tmp_path / str(index)) for index, slurm in enumerate(slurms)]
    assert jobs[0][1] == jobs[1][1]  # the same number on two clusters
    slurms[0].set_state(jobs[0][1], "FAILED")
    assert [state(job) for job, _ in jobs] == ["FAILED", "PENDING"]


def test_one_question_for_all_jobs_of_an_executor(tmp_path: Path) -> None:
    asked: list[int] = []

    class CountingSlurm(FakeSlurm):
        def queue(self, job_ids: Any) -> list[QueueRow]:
            asked.append(len(job_ids))
            return super().queue(job_ids)

    executor = HetSlurmExecutor(tmp_path, COMPONENTS, slurm=CountingSlurm())
    jobs = executor.map_array(print, ["a", "b", "c"])
    assert [job.state for job in jobs] == ["PENDING"] * 3
    assert asked == [3]


def test_a_token_stands_for_one_submission(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    executor = HetSlurmExecutor(tmp_path, COMPONENTS, slurm=slurm, token="mine")
    job = executor.submit(print)
    assert slurm.jobs[int(job.job_id)].token == "mine"
    with pytest.raises(UserError, match="another with a new token"):
        executor.submit(print)


def test_the_folder_and_components_are_checked(tmp_path: Path) -> None:
    for bad in (tmp_path / "100%", tmp_path / "a\\b"):
        with pytest.raises(UserError, match="choose another directory"):
            HetSlurmExecutor(bad, COMPONENTS, slurm=FakeSlurm())
        with pytest.raises(UserError, match="choose another directory"):
            HetSlurmExecutor(tmp_path, COMPONENTS, slurm=FakeSlurm(), output=bad / "%j.out")
    with pytest.raises(UserError, match="components is empty"):
        HetSlurmExecutor(tmp_path, [], slurm=FakeSlurm())
    with pytest.raises(UserError, match="component 0: time: 'soon'"):
        HetSlurmExecutor(tmp_path, [{"time": "soon"}], slurm=FakeSlurm())


def test_parameters_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    executor = HetSlurmExecutor(tmp_path, COMPONENTS, slurm=FakeSlurm())
    with pytest.raises(UserError, match="partition belongs into components"):
        executor.update_parameters(partition="train")
    scripted = HetSlurmExecutor(tmp_path, COMPONENTS, slurm=FakeSlurm(), script=lambda command: command)
    with pytest.raises(UserError, match="script="):
        scripted.update_parameters(job_name="x")


def test_an_answer_from_another_cluster_keeps_asking_there(tmp_path: Path) -> None:
    asked: list[JobId] = []

    class FarSlurm(FakeSlurm):
        def submit(self, script: Path, *, token: str) -> JobId:
            return JobId(super().submit(script, token=token).number, cluster="far")

        def queue(self, job_ids: Any) -> list[QueueRow]:
            asked.extend(job_ids)
            return super().queue(job_ids)

    job, _ = submit(FarSlurm(), tmp_path)
    assert (job.job_id, state(job)) == ("1", "PENDING")
    assert {job_id.cluster for job_id in asked} == {"far"}


def test_a_watcher_without_jobs_asks_nothing() -> None:
    watcher = HetInfoWatcher(FakeSlurm())
    watcher.update()
    assert watcher.num_calls == 0
