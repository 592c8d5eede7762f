"""The join of a run directory and Slurm's rows."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.cli.cancel import cancel_run
from slime_hpc.errors import ClusterError, UserError
from slime_hpc.facts import query_job, read_records
from slime_hpc.plan import one_host_plan
from slime_hpc.records import append_jsonl, read_json, write_json
from slime_hpc.resume import resume_run
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.spec.load import Profile
from slime_hpc.status import STALLED_AFTER_S, StatusReport, join_status, load_status
from slime_hpc.submit import begin_local_run, submit_run
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId

JOB = JobId(1)


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


class DeafSlurm(FakeSlurm):
    def queue(self, job_ids: Any) -> list[QueueRow]:
        raise ClusterError("squeue did not answer within 60 s")


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def run(profile: Profile, slurm: FakeSlurm) -> RunDir:
    submit_run(profile, slurm, supervise)
    return RunDir(profile.spec.run_dir)


def status_at(run: RunDir, slurm: FakeSlurm, now: float) -> StatusReport:
    records = read_records(run)
    return join_status(records, query_job(records, slurm), now)


def end(run: RunDir, cause: str, **fields: Any) -> None:
    ended = {"attempt": 1, "cause": cause, "detail": f"because of {cause}", "role": None, "node": None, "round": 3}
    write_json(run.attempt(1).ended, ended | {"started": 1000.0, "ended": 2800.0, "exit_code": 0} | fields)


def test_pending_with_each_component_reason(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.jobs[1].components[1].reason = "Resources"
    report = load_status(run, slurm)
    assert (report.state, report.verdict) == ("pending", "waiting")
    assert report.pending == {"trainer": "None", "rollout": "Resources"}
    assert report.why == "job 1 is in the queue: Slurm's reason is trainer None, rollout Resources"
    assert report.attempts[0].gpu_hours is None


def test_pending_for_ever_says_what_to_do(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.jobs[1].components[1].reason = "PartitionTimeLimit"
    report = load_status(run, slurm)
    assert "cannot start as it is" in report.why
    assert report.next_step is not None and "mend rollout in the profile" in report.next_step


def test_running(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "RUNNING")
    started = slurm.jobs[1].components[0].start
    assert started is not None
    write_json(run.heartbeat, {"time": started + 3000.0, "phase": "train", "round": 7, "attempt": 1})
    append_jsonl(run.metrics, {"attempt": 1, "round": 6, "step": 7, "rollout/raw_reward": 0.25})
    report = status_at(run, slurm, now=started + 3600.0)
    assert (report.state, report.verdict) == ("running", "ok")
    assert report.why == "round 7 of 50: train, reported 600 s ago"
    assert (report.round, report.num_rollout, report.reward) == (6, 50, 0.25)
    assert report.attempts[0].gpu_hours == 2.0  # one GPU of each component, one hour


def test_stalled(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "RUNNING")
    started = slurm.jobs[1].components[0].start
    assert started is not None
    write_json(run.heartbeat, {"time": started + 10.0, "phase": "generate", "round": 0, "attempt": 1})
    report = status_at(run, slurm, now=started + 11.0 + STALLED_AFTER_S)
    assert (report.state, report.verdict) == ("stalled", "stalled")
    assert report.next_step == f"slime-hpc logs {run.path} driver"


def test_stalled_before_the_first_heartbeat(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "RUNNING")
    assert status_at(run, slurm, now=time.time()).verdict == "ok"
    assert status_at(run, slurm, now=time.time() + 2 * STALLED_AFTER_S).verdict == "stalled"


@pytest.mark.parametrize(
    ("cause", "verdict"),
    [
        ("finished", "finished"),
        ("cancelled", "cancelled"),
        ("stopped", "stopped"),
        ("crashed", "failed"),
        ("node_failure", "failed"),
        ("misconfigured", "failed"),
        ("time_limit", "failed"),
        ("unknown", "unknown"),
    ],
)
def test_ended_as_the_supervisor_recorded(run: RunDir, slurm: FakeSlurm, cause: str, verdict: str) -> None:
    slurm.set_state(JOB, "COMPLETED")
    end(run, cause)
    report = load_status(run, slurm)
    assert (report.state, report.verdict, report.why) == ("ended", verdict, f"because of {cause}")
    (attempt,) = report.attempts
    assert (attempt.job_id, attempt.state, attempt.cause) == ("1", "COMPLETED", cause)
    assert (attempt.started, attempt.ended, attempt.gpu_hours) == (1000.0, 2800.0, 1.0)


@pytest.mark.parametrize(
    ("state", "cause", "verdict"),
    [
        ("CANCELLED", "cancelled", "cancelled"),
        ("TIMEOUT", "time_limit", "failed"),
        ("NODE_FAIL", "node_failure", "failed"),
        ("PREEMPTED", "preempted", "failed"),
        ("FAILED", "crashed", "failed"),
        ("COMPLETED", "unknown", "unknown"),
    ],
)
@pytest.mark.parametrize("forgotten", [False, True])
def test_ended_without_a_record(
    run: RunDir, slurm: FakeSlurm, state: str, cause: str, verdict: str, forgotten: bool
) -> None:
    slurm.set_state(JOB, "RUNNING")
    slurm.set_state(JOB, state)
    slurm.jobs[1].forgotten = forgotten
    report = load_status(run, slurm)
    assert (report.state, report.verdict, report.attempts[0].cause) == ("ended", verdict, cause)
    assert report.why.startswith(f"Slurm says {state}; the supervisor left no record of its end")


def test_the_output_of_a_job_that_never_had_a_supervisor_is_quoted(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "FAILED")
    assert f"Slurm's output {run.slurm_output('1')} is not there" in load_status(run, slurm).why
    run.slurm_output("1").write_text("".join(f"line {i}\n" for i in range(9)) + "python: command not found\n")
    why = load_status(run, slurm).why
    assert why.endswith(
        f"the end of {run.slurm_output('1')}:\n  line 4\n"
        + "".join(f"  line {i}\n" for i in range(5, 9))
        + "  python: command not found"
    )
    slurm.jobs[1].forgotten = True
    slurm.has_accounting = False
    assert load_status(run, slurm).why.endswith("python: command not found")


@pytest.fixture
def local(profile: Profile) -> RunDir:
    """As `slime-hpc run` in this very process begins it."""
    begin_local_run(profile, one_host_plan(profile, 2))
    return RunDir(profile.spec.run_dir)


def change_record(run: RunDir, **fields: Any) -> None:
    write_json(run.submit, {**read_json(run.submit), **fields})


def test_a_run_without_slurm(local: RunDir) -> None:
    report = load_status(local, DeafSlurm())
    assert (report.state, report.verdict, report.attempts[0].job_id) == ("running", "ok", None)
    assert "its driver has not reported yet" in report.why
    end(local, "finished")
    assert load_status(local, DeafSlurm()).verdict == "finished"


def test_a_run_without_slurm_whose_process_is_gone(local: RunDir) -> None:
    change_record(local, process="another boot/1")
    report = load_status(local, DeafSlurm())
    assert (report.state, report.verdict) == ("ended", "unknown")
    assert report.why == f"process {os.getpid()} on {os.uname().nodename} is gone, and left no record of its end"
    assert cancel_run(read_records(local), DeafSlurm()) == (None, False)


def test_a_run_without_slurm_on_another_host(local: RunDir) -> None:
    change_record(local, host="elsewhere")
    assert "only elsewhere, where `slime-hpc run` was started, can tell" in load_status(local, DeafSlurm()).why
    with pytest.raises(UserError, match=r"on elsewhere cannot be ended from here"):
        cancel_run(read_records(local), DeafSlurm())


def test_cancel_of_a_run_without_slurm(local: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    assert cancel_run(read_records(local), DeafSlurm()) == (None, True)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert local.attempt(1).cancel_marker.exists()


def test_gone_from_slurm_without_accounting(profile: Profile) -> None:
    slurm = FakeSlurm(has_accounting=False)
    submit_run(profile, slurm, supervise)
    slurm.jobs[1].forgotten = True
    report = load_status(RunDir(profile.spec.run_dir), slurm)
    assert (report.state, report.verdict) == ("ended", "unknown")
    assert "no longer knows job 1" in report.why


def test_a_state_of_tomorrow_is_shown_as_it_is(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "HIBERNATING")
    report = load_status(run, slurm)
    assert (report.verdict, report.attempts[0].state) == ("unknown", "HIBERNATING")
    assert "Slurm says HIBERNATING" in report.why


def test_client_died_before_it_recorded_the_job(run: RunDir, slurm: FakeSlurm) -> None:
    run.submit.unlink()
    report = load_status(run, slurm)
    assert (report.verdict, report.attempts[0].job_id) == ("waiting", "1")
    assert cancel_run(read_records(run), slurm) == (JOB, True)


def test_client_died_before_sbatch(run: RunDir) -> None:
    run.submit.unlink()
    report = load_status(run, FakeSlurm())
    assert (report.state, report.verdict) == ("ended", "unknown")
    assert "never submitted" in report.why
    assert report.next_step == f"remove {run.path} and submit again"


def test_slurm_does_not_answer(run: RunDir) -> None:
    report = load_status(run, DeafSlurm())
    assert (report.verdict, report.attempts[0].job_id) == ("unknown", "1")
    assert report.why == "Slurm could not be asked: squeue did not answer within 60 s"
    end(run, "finished")
    assert load_status(run, DeafSlurm()).verdict == "finished"


def test_sacct_bare_row_is_not_taken_for_the_job(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "COMPLETED")
    slurm.jobs[1].forgotten = True
    slurm.jobs[1].components = slurm.jobs[1].components[:1]
    slurm.jobs[1].components[0].job_id = JOB
    assert load_status(run, slurm).attempts[0].state is None


def test_not_a_run_directory(tmp_path: Path, quickstart: Path) -> None:
    for path in (tmp_path, quickstart, tmp_path / "none"):
        with pytest.raises(UserError, match="is not a run directory"):
            read_records(RunDir(path))


def test_cancel_leaves_its_marker_once(run: RunDir, slurm: FakeSlurm) -> None:
    assert cancel_run(read_records(run), slurm) == (JOB, True)
    assert all(part.state.name == "CANCELLED" for part in slurm.jobs[1].components)
    marker = run.attempt(1).cancel_marker
    marker.unlink()
    assert cancel_run(read_records(run), slurm) == (JOB, False)
    assert not marker.exists()


def test_cancel_of_an_ended_run_does_nothing(run: RunDir, slurm: FakeSlurm) -> None:
    end(run, "finished")
    slurm.set_state(JOB, "COMPLETING")
    assert cancel_run(read_records(run), slurm) == (JOB, False)
    assert not run.attempt(1).cancel_marker.exists()


def test_a_requeued_job_waits_and_can_be_cancelled(run: RunDir, slurm: FakeSlurm) -> None:
    write_json(run.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 1000.0})
    end(run, "preempted")
    report = load_status(run, slurm)
    assert (report.state, report.verdict) == ("pending", "waiting")
    assert "put job 1 back into the queue" in report.why
    assert report.attempts[0].cause == "preempted"
    assert cancel_run(read_records(run), slurm) == (JOB, True)
    assert run.attempt(1).cancel_marker.exists()


def test_each_attempt_shows_its_own_job(run: RunDir, slurm: FakeSlurm) -> None:
    write_json(run.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 1000.0})
    end(run, "crashed")
    slurm.set_state(JOB, "FAILED")
    assert "slime-hpc resume" in str(load_status(run, slurm).next_step)
    resume_run(run, slurm, supervise)
    report = load_status(run, slurm)
    assert [(a.number, a.job_id, a.cause) for a in report.attempts] == [(1, "1", "crashed"), (2, "3", None)]
    assert (report.state, report.why[:5]) == ("pending", "job 3")


def test_cancel_that_slurm_refuses_leaves_no_marker(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ClusterError("Access denied")

    monkeypatch.setattr(slurm, "cancel", refuse)
    with pytest.raises(ClusterError, match="denied"):
        cancel_run(read_records(run), slurm)
    assert not run.attempt(1).cancel_marker.exists()


def test_a_resume_whose_job_was_not_recorded_is_found(run: RunDir, slurm: FakeSlurm) -> None:
    """The client died between sbatch and its record: the record is of the job before."""
    slurm.set_state(JOB, "FAILED")
    end(run, "crashed")
    before = read_json(run.submit)
    resume_run(run, slurm, supervise)
    write_json(run.submit, before)
    report = load_status(run, slurm)
    assert (report.state, report.attempts[-1].job_id) == ("pending", "3")
    assert cancel_run(read_records(run), slurm) == (JobId(3), True)


def test_a_resume_that_was_never_submitted_costs_nothing(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.set_state(JOB, "FAILED")
    end(run, "crashed")
    before = read_json(run.submit)
    resume_run(run, slurm, supervise)
    write_json(run.submit, before)
    del slurm.jobs[3]
    report = load_status(run, slurm)
    assert "attempt 2" in report.why and report.next_step == f"slime-hpc resume {run.path}"
    assert resume_run(run, slurm, supervise).attempt == 3


def test_a_job_that_slurm_has_started_again_runs(run: RunDir, slurm: FakeSlurm) -> None:
    """Its next attempt has no directory until its supervisor is up."""
    slurm.set_state(JOB, "RUNNING")
    write_json(run.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 0.0})
    end(run, "preempted", ended=time.time() + 1000)
    assert cancel_run(read_records(run), slurm) == (JOB, False)  # it is only completing
    end(run, "preempted")
    report = load_status(run, slurm)
    assert (report.state, report.verdict) == ("running", "ok") and "attempt 2 is about to begin" in report.why
    assert cancel_run(read_records(run), slurm) == (JOB, True)


def test_a_heartbeat_is_of_its_own_attempt(run: RunDir, slurm: FakeSlurm) -> None:
    end(run, "crashed")
    slurm.set_state(JOB, "FAILED")
    write_json(run.heartbeat, {"time": time.time(), "phase": "train", "round": 7, "attempt": 1})
    resume_run(run, slurm, supervise)
    slurm.set_state(JobId(3), "RUNNING")
    assert "its driver has not reported yet" in load_status(run, slurm).why
