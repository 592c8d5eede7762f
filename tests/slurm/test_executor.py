"""HetSlurmExecutor on a real Slurm: what a job handle says, and that it never waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitit.core.core import Job
from submitit.core.utils import FailedJobError, UncompletedJobError

from slime_hpc.errors import SlurmCommandError
from slime_hpc.slurm.commands import SlurmCli
from slime_hpc.slurm.directives import Options, sbatch_directives
from slime_hpc.slurm.executor import HetJob, HetSlurmExecutor
from slime_hpc.types import JobId

pytestmark = pytest.mark.usefixtures("devcluster")

COMPONENTS: list[Options] = [
    {"partition": "train", "account": "dev", "nodes": 1, "time": 5},
    {"partition": "rollout", "account": "dev", "nodes": 1, "time": 5},
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit waits 15 s for a result file to appear on a slow file system; here it is there at once or never."""
    monkeypatch.setattr(HetJob, "_results_timeout_s", 2)


@pytest.fixture(autouse=True)
def importable_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job unpickles this module's functions."""
    here = Path(__file__).parent
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(here), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    )


@pytest.fixture
def executor(tmp_path: Path) -> HetSlurmExecutor:
    return HetSlurmExecutor(tmp_path / "with space", COMPONENTS)


def describe(word: str) -> dict[str, Any]:
    print(f"said {word}")
    return {
        "word": word, "pid": os.getpid(), "parent": Path(f"/proc/{os.getppid()}/comm").read_text().strip(),
        "size": os.environ["SLURM_HET_SIZE"], "job_id": os.environ["SLURM_JOB_ID"],
    }  # fmt: skip


def fail() -> None:
    raise ValueError("no such luck")


def vanish() -> None:
    print("about to vanish", flush=True)
    os._exit(3)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float) -> str:
    print("sleeping", flush=True)
    time.sleep(seconds)
    return "slept"


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"after {deadline_s:g} s still waiting for {what}"
        time.sleep(0.2)


def accounted_states(job: Job[Any]) -> set[str]:
    return {str(row.state) for row in SlurmCli().accounting([JobId.parse(job.job_id)]) or []}


def test_a_result_comes_back_from_a_het_job(executor: HetSlurmExecutor) -> None:
    job = executor.submit(describe, "hello")
    seen = job.result()
    assert isinstance(job, HetJob)
    assert (seen["word"], seen["size"], seen["job_id"]) == ("hello", "2", job.job_id)
    assert seen["parent"] == "slurmstepd"  # Python is the batch shell, not its child
    assert "said hello" in (job.stdout() or "")
    assert job.exception() is None
    wait_for("state COMPLETED", lambda: job.get_info(mode="force").get("State") == "COMPLETED")
    assert job.state == "COMPLETED"
    assert job.done()


def test_states_follow_the_job(executor: HetSlurmExecutor) -> None:
    job = executor.submit(sleep, 4)
    assert job.state in ("PENDING", "RUNNING")
    assert not job.done(force_check=True)
    wait_for("state RUNNING", lambda: job.get_info(mode="force")["State"] == "RUNNING")
    assert not job.done(force_check=True)
    assert job.result() == "slept"


def test_an_exception_in_the_function_is_raised_here(executor: HetSlurmExecutor) -> None:
    job = executor.submit(fail)
    with pytest.raises(FailedJobError, match="no such luck"):
        job.result()
    assert "no such luck" in str(job.exception())
    wait_for("state FAILED", lambda: job.get_info(mode="force").get("State") == "FAILED")


@pytest.mark.parametrize(("function", "state"), [(vanish, "FAILED"), (kill_self, "FAILED")])
def test_a_job_that_dies_without_a_result_raises_in_bounded_time(
    executor: HetSlurmExecutor, function: Callable[[], None], state: str
) -> None:
    job = executor.submit(function)
    start = time.monotonic()
    with pytest.raises(UncompletedJobError, match=f"state: {state}"):
        job.result()
    assert time.monotonic() - start < 60


def test_cancel_ends_every_component(executor: HetSlurmExecutor) -> None:
    job = executor.submit(sleep, 300)
    wait_for("state RUNNING", lambda: job.get_info(mode="force").get("State") == "RUNNING")
    job.cancel()
    with pytest.raises(UncompletedJobError, match="state: CANCELLED"):
        job.result()
    assert job.done()
    wait_for("accounting", lambda: accounted_states(job) == {"CANCELLED"})


def test_cancel_of_a_pending_job(tmp_path: Path) -> None:
    job = HetSlurmExecutor(tmp_path, [{**COMPONENTS[0], "hold": True}, COMPONENTS[1]]).submit(sleep, 1)
    assert job.state == "PENDING"
    job.cancel()
    with pytest.raises(UncompletedJobError, match="state: CANCELLED"):
        job.result()


def test_a_term_does_not_requeue(executor: HetSlurmExecutor) -> None:
    job = executor.submit(sleep, 300)
    wait_for("the function to run", lambda: "sleeping" in (job.stdout() or ""))
    SlurmCli().cancel(JobId.parse(job.job_id), signal="TERM", batch=True)
    wait_for("the signal to arrive", lambda: "Bypassing signal SIGTERM" in (job.stdout() or "") + (job.stderr() or ""))
    job.cancel()
    wait_for("the end", lambda: job.done(force_check=True))
    assert job.state == "CANCELLED"
    rows = SlurmCli().queue([JobId.parse(job.job_id)])
    assert {row.restarts for row in rows} == {0}


def test_a_job_is_picked_up_again_by_its_id(executor: HetSlurmExecutor) -> None:
    job = executor.submit(describe, "again")
    again: HetJob[Any] = HetJob(executor.folder, job.job_id)
    assert again.result()["word"] == "again"


def test_two_executors_at_once(tmp_path: Path) -> None:
    first = HetSlurmExecutor(tmp_path / "a", COMPONENTS, slurm=SlurmCli(timeout_s=50))
    second = HetSlurmExecutor(tmp_path / "b", COMPONENTS, slurm=SlurmCli(timeout_s=40))
    jobs = [first.submit(describe, "first"), second.submit(describe, "second")]
    assert [job.result()["word"] for job in jobs] == ["first", "second"]
    assert jobs[0].watcher is not jobs[1].watcher


def test_map_array_and_batch_make_one_het_job_each(executor: HetSlurmExecutor) -> None:
    jobs = executor.map_array(describe, ["one", "two"])
    with executor.batch():
        jobs.append(executor.submit(describe, "three"))
    results = [job.result() for job in jobs]
    assert [result["word"] for result in results] == ["one", "two", "three"]
    assert {result["size"] for result in results} == {"2"}
    assert len({job.job_id for job in jobs}) == 3


def test_a_script_and_output_of_ones_own(tmp_path: Path) -> None:
    output = tmp_path / "logs" / "slurm-%j.out"

    def script(command: str) -> str:
        lines = sbatch_directives(COMPONENTS, name="own", output=str(output))
        return "\n".join(["#!/bin/bash", *lines, "echo from the script", command, ""])

    executor = HetSlurmExecutor(
        tmp_path / "submitit", COMPONENTS, script=script, output=output, token=f"own-{tmp_path}"
    )
    job = executor.submit(describe, "hello")
    assert job.result()["word"] == "hello"
    assert (job.stdout() or "").startswith("from the script\n")
    assert job.paths.stdout == tmp_path / "logs" / f"slurm-{job.job_id}.out"
    assert {str(row.job_id.leader) for row in SlurmCli().find(f"own-{tmp_path}")} == {job.job_id}


def test_a_refusal_is_in_slurms_words(tmp_path: Path) -> None:
    executor = HetSlurmExecutor(tmp_path, [COMPONENTS[0], {**COMPONENTS[1], "partition": "nosuch"}])
    with pytest.raises(SlurmCommandError, match="invalid partition specified: nosuch"):
        executor.submit(describe, "never")


def test_a_handle_survives_pickling(executor: HetSlurmExecutor, tmp_path: Path) -> None:
    import pickle

    job = executor.submit(describe, "pickled")
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(job))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).result()['word'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job.pkl")], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout.strip() == "pickled", done.stderr
