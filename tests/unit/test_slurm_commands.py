"""SlurmCli against small stand-ins for Slurm's binaries: what it makes of failures, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_hpc.errors import ClusterError, DeadlineExceeded, SlurmCommandError
from slime_hpc.slurm.commands import SlurmCli, dropped_variables
from slime_hpc.types import JobId

Binary = Callable[..., None]
ROW = "{id}|N/A|N/A|{state}|None||N/A|N/A|0|{comment}|"


@pytest.fixture
def binary(tmp_path: Path) -> Binary:
    """``binary("squeue", "echo hello")`` puts a shell script of that name on SlurmCli's PATH; it logs its calls."""

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
        path.chmod(0o755)

    return write


@pytest.fixture
def slurm(tmp_path: Path) -> SlurmCli:
    return SlurmCli(
        environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout_s=5, retry_delays_s=(0.01, 0.01, 0.01)
    )


def calls(folder: Path, name: str) -> int:
    return sum(line.startswith(f"{name} ") for line in (folder / "calls").read_text().splitlines())


def fail(message: str, code: int = 1) -> str:
    return f"echo '{message}' >&2; exit {code}"


def test_a_refusal_is_raised_whole_and_not_tried_again(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    words = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition"
    )
    binary("sbatch", fail(words))
    binary("squeue", "")
    with pytest.raises(SlurmCommandError) as caught:
        slurm.submit(tmp_path / "s", token="t")
    assert caught.value.stderr == words
    assert calls(tmp_path, "sbatch") == 1


def test_a_lost_connection_is_tried_again_a_bounded_number_of_times(
    slurm: SlurmCli, binary: Binary, tmp_path: Path
) -> None:
    binary("sbatch", fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"))
    binary("squeue", "echo '" + ROW.format(id=7, state="RUNNING", comment="another") + "'")
    with pytest.raises(SlurmCommandError, match="Socket timed out"):
        slurm.submit(tmp_path / "s", token="t")
    assert calls(tmp_path, "sbatch") == calls(tmp_path, "squeue") == 3


def test_a_job_that_was_queued_all_the_same_is_found(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    binary("sbatch", fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"))
    binary("squeue", "echo '" + ROW.format(id=12, state="PENDING", comment="t") + "'")
    assert slurm.submit(tmp_path / "s", token="t") == JobId(12)
    assert calls(tmp_path, "sbatch") == 1


def test_an_answer_with_retries_of_sbatchs_own_is_an_id(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    binary(
        "sbatch", "echo 'Slurm temporarily unable to accept job, sleeping and retrying' >&2; echo Submitted batch job 9"
    )
    assert slurm.submit(tmp_path / "s", token="t") == JobId(9)


def test_what_a_refused_component_leaves_behind_is_not_the_job(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    binary("sbatch", fail("sbatch: error: Batch job submission failed: Invalid account"))
    binary("squeue", "echo '" + ROW.format(id=12, state="CANCELLED", comment="t") + "'")
    with pytest.raises(SlurmCommandError, match="Invalid account"):
        slurm.submit(tmp_path / "s", token="t")


def test_never_submitted_again_while_the_first_try_cannot_be_looked_up(
    slurm: SlurmCli, binary: Binary, tmp_path: Path
) -> None:
    binary("sbatch", fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"))
    binary("squeue", fail("slurm_load_jobs error: Unable to contact slurm controller (connect failure)"))
    with pytest.raises(ClusterError, match=r"cannot be told.*look for the comment 't'"):
        slurm.submit(tmp_path / "s", token="t")
    assert calls(tmp_path, "sbatch") == 1


def test_an_unreachable_slurm_is_said_in_its_words(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    binary(
        "sbatch",
        fail("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"),
    )
    binary("squeue", fail("slurm_load_jobs error: Unable to contact slurm controller (connect failure)"))
    with pytest.raises(SlurmCommandError, match=r"sbatch failed \(exit 1\): .*connect failure"):
        slurm.submit(tmp_path / "s", token="t")
    assert calls(tmp_path, "sbatch") == 1


def test_a_command_that_hangs_is_a_deadline(binary: Binary, tmp_path: Path) -> None:
    binary("squeue", "exec sleep 30")
    with pytest.raises(DeadlineExceeded, match=r"squeue did not answer within 0\.2 s"):
        SlurmCli(environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout_s=0.2).queue([JobId(1)])


def test_a_forgotten_job_is_no_row_and_other_errors_are_raised(slurm: SlurmCli, binary: Binary) -> None:
    binary("squeue", fail("slurm_load_jobs error: Invalid job id specified"))
    assert slurm.queue([JobId(1)]) == []
    binary("squeue", fail("slurm_load_jobs error: Unable to contact slurm controller"))
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        slurm.queue([JobId(1)])


def test_disabled_accounting_is_none_and_other_errors_are_raised(slurm: SlurmCli, binary: Binary) -> None:
    binary("sacct", fail("Slurm accounting storage is disabled"))
    assert slurm.accounting([JobId(1)]) is None
    binary("sacct", fail("sacct: error: slurm_persist_conn_open: Connection refused"))
    with pytest.raises(SlurmCommandError, match="Connection refused"):
        slurm.accounting([JobId(1)])


def test_jobs_of_another_cluster_are_asked_for_there(slurm: SlurmCli, binary: Binary, tmp_path: Path) -> None:
    binary("squeue", "")
    binary("scancel", "")
    slurm.queue([JobId(1), JobId(2, cluster="far"), JobId(3)])
    slurm.cancel(JobId(2, cluster="far"), signal="USR1", batch=True)
    here, far, cancel = (tmp_path / "calls").read_text().splitlines()
    assert "--jobs=1,3" in here and "--clusters" not in here
    assert "--clusters=far --jobs=2" in far
    assert cancel == "scancel --clusters=far --signal=USR1 --batch 2"


def test_a_strangers_comment_does_not_disturb_the_search(slurm: SlurmCli, binary: Binary) -> None:
    binary("squeue", f"cat <<'E'\n{ROW.format(id=5, state='RUNNING', comment='two')}\nlines|\n"
                     f"{ROW.format(id=6, state='RUNNING', comment='t')}\nE")  # fmt: skip
    assert [row.job_id for row in slurm.find("t")] == [JobId(6)]


def test_what_is_dropped_from_the_environment() -> None:
    misleading = [
        "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "PMIX_RANK", "PMI_SIZE", "SBATCH_NO_REQUEUE",
        "SBATCH_PARTITION", "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SRUN_DEBUG",
    ]  # fmt: skip
    kept = [
        "HOME", "PATH", "SLURM_CONF", "SLURM_JWT", "MY_SLURM_NOTES", "HYDRA_FULL_ERROR", "OMPI_MCA_btl",
        "PMIX_MCA_gds", "SQUEUE_FORMAT",
    ]  # fmt: skip
    assert dropped_variables(dict.fromkeys([*misleading, *kept], "x")) == misleading
