"""SlurmCli's own promises, on a real Slurm: one job per submission, scrubbed environment, whole option values."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_hpc.errors import ClusterError, SlurmCommandError
from slime_hpc.slurm.allocation import Allocation
from slime_hpc.slurm.commands import SlurmCli
from slime_hpc.slurm.directives import Options, sbatch_directives
from slime_hpc.slurm.hosts import expand_nodes
from slime_hpc.types import JobId

pytestmark = pytest.mark.usefixtures("devcluster")

HET: list[Options] = [
    {"partition": "train", "account": "dev", "nodes": 1, "time": 5},
    {"partition": "rollout", "account": "dev", "nodes": 2, "time": 3},
]


@pytest.fixture
def cancel_after() -> Iterator[list[JobId]]:
    jobs: list[JobId] = []
    yield jobs
    for job in jobs:
        SlurmCli().cancel(job)


def write_script(folder: Path, body: str, components: list[Options] | None = None) -> Path:
    lines = sbatch_directives(components or HET, name="commands", output=str(folder / "%j.out"))
    path = folder / "job.sbatch"
    path.write_text("\n".join(["#!/bin/bash", *lines, body, ""]))
    return path


def wait_until_over(job: JobId, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not all(row.state.is_over for row in SlurmCli().queue([job])):
        assert time.monotonic() < end, f"job {job} is not over after {deadline_s} s"
        time.sleep(0.3)


def losing_sbatch(folder: Path, exit_code: int, message: str) -> dict[str, str]:
    """An environment whose sbatch submits for real, and then loses the answer."""
    sbatch = shutil.which("sbatch")
    wrapper = folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\n"{sbatch}" "$@" > /dev/null\necho "{message}" >&2\nexit {exit_code}\n')
    wrapper.chmod(0o755)
    return {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [
        (1, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"),
        (1, "sbatch: error: something this module has never heard of"),
        (0, "the answer got lost in a wrapper script"),
    ],
)
def test_a_submission_whose_answer_is_lost_makes_one_job(
    tmp_path: Path, cancel_after: list[JobId], exit_code: int, message: str
) -> None:
    script = write_script(tmp_path, "sleep 60")
    slurm = SlurmCli(environ=losing_sbatch(tmp_path, exit_code, message), retry_delays_s=(0.5, 0.5))
    job = slurm.submit(script, token=f"lost-{tmp_path}")
    cancel_after.append(job)
    assert {row.job_id.leader for row in slurm.find(f"lost-{tmp_path}")} == {job}


def test_a_submission_that_really_failed_is_tried_again(tmp_path: Path, cancel_after: list[JobId]) -> None:
    script = write_script(tmp_path, "sleep 60")
    environ = losing_sbatch(tmp_path, 1, "sbatch: error: Unable to contact slurm controller (send failure)")
    wrapper = tmp_path / "bin" / "sbatch"
    once = tmp_path / "failed-once"
    real = shutil.which("sbatch")
    wrapper.write_text(
        f'#!/bin/sh\n[ -e {once} ] && exec "{real}" "$@"\ntouch {once}\n'
        "echo 'sbatch: error: Unable to contact slurm controller (send failure)' >&2\nexit 1\n"
    )
    job = SlurmCli(environ=environ, retry_delays_s=(0.2, 0.2)).submit(script, token=f"again-{tmp_path}")
    cancel_after.append(job)
    assert len(SlurmCli().find(f"again-{tmp_path}")) == 2  # one job, two components


def test_variables_of_an_enclosing_job_reach_neither_sbatch_nor_the_job(tmp_path: Path) -> None:
    misleading = {
        "SBATCH_PARTITION": "nosuch", "SBATCH_NO_KILL": "1", "SLURM_CPU_BIND": "none", "SLURM_HET_SIZE": "7",
        "PMIX_RANK": "3", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative", "SACCT_FORMAT": "jobname",
    }  # fmt: skip
    script = write_script(tmp_path, "env")
    slurm = SlurmCli(environ={**os.environ, **misleading, "LC_ALL": "C.UTF-8", "MINE": "kept"})
    job = slurm.submit(script, token=f"env-{tmp_path}")
    wait_until_over(job)
    seen = dict(line.partition("=")[::2] for line in (tmp_path / f"{job}.out").read_text().splitlines())
    assert seen["MINE"] == "kept"
    assert seen["LC_ALL"] == "C.UTF-8"
    assert seen["SLURM_HET_SIZE"] == "2"
    assert not {"PMIX_RANK", "SLURM_CPU_BIND", "SLURM_TIME_FORMAT"} & seen.keys()
    assert seen["SQUEUE_FORMAT"] == "%i"  # how a user likes tables is kept from our own queries only
    assert len(slurm.queue([job])) == 2


def test_the_allocation_is_what_slurm_says_it_is(tmp_path: Path) -> None:
    slurm = SlurmCli()
    job = slurm.submit(write_script(tmp_path, "env"), token=f"allocation-{tmp_path}")
    wait_until_over(job)
    seen = dict(line.partition("=")[::2] for line in (tmp_path / f"{job}.out").read_text().splitlines())
    allocation = Allocation.from_environ(seen)
    rows = sorted(slurm.queue([job]), key=lambda row: row.job_id)
    assert allocation.job_id == job
    assert [c.job_id for c in allocation.components] == [row.raw_id for row in rows]
    assert [list(c.nodes) for c in allocation.components] == [expand_nodes(row.node_list) for row in rows]
    assert [len(c.nodes) for c in allocation.components] == [1, 2]
    assert allocation.batch_node == seen["SLURMD_NODENAME"]
    assert allocation.restart_count == 0


@pytest.mark.parametrize("text", ["it's", 'say "q"', r"$HOME `x` \ # %j", "ünï", "-lead", "(a),v1", "a'b\"c d", "#1"])
def test_any_text_survives_an_sbatch_line(tmp_path: Path, text: str) -> None:
    """The batch shell's working directory shows what sbatch made of --chdir."""
    folder = tmp_path / text
    folder.mkdir()
    script = write_script(tmp_path, "pwd", [{**HET[0], "chdir": str(folder)}, HET[1]])
    job = SlurmCli().submit(script, token=f"text-{tmp_path}")
    wait_until_over(job)
    assert (tmp_path / f"{job}.out").read_text().strip() == str(folder)


def test_no_option_leaks_into_the_next_component(tmp_path: Path, cancel_after: list[JobId]) -> None:
    node = expand_nodes(next(row for row in SlurmCli().partitions() if row.name == "train").node_list)[1]
    leader = {**HET[0], "exclude": node, "nice": 7, "hint": "nomultithread", "gpus-per-node": 1, "hold": True}
    job = SlurmCli().submit(write_script(tmp_path, "true", [leader, HET[1]]), token=f"leak-{tmp_path}")
    cancel_after.append(job)
    command = ["scontrol", "--oneliner", "show", "job", str(job)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [f"ExcNodeList={node}" in line for line in shown] == [True, False]
    assert [" Nice=7 " in line for line in shown] == [True, False]
    assert ["gres:gpu:1" in line for line in shown] == [True, False]
    assert ["TimeLimit=00:05:00" in line for line in shown] == [True, False]
    assert ["JobName=commands-rollout" in line for line in shown] == [False, True]
    assert all("Requeue=0" in line for line in shown)


def test_a_component_cannot_be_cancelled_while_pending(tmp_path: Path, cancel_after: list[JobId]) -> None:
    slurm = SlurmCli()
    job = slurm.submit(write_script(tmp_path, "true", [{**HET[0], "hold": True}, HET[1]]), token=f"part-{tmp_path}")
    cancel_after.append(job)
    with pytest.raises(SlurmCommandError, match="not permitted on individual component"):
        slurm.cancel(JobId(job.number, 1))


def test_a_missing_slurm_is_one_message() -> None:
    with pytest.raises(ClusterError, match="squeue is not on PATH; load your site's Slurm module"):
        SlurmCli(environ={"PATH": "/nonexistent"}).queue([JobId(1)])


@pytest.mark.parametrize(
    "node_list", ["b04-[09-10]", "n[098-101]", "a[01-03,7],b-[1-2]", "a1,a01", "r[1-2]n[08-09]", "n[9-11,13]"]
)
def test_nodes_are_expanded_as_scontrol_does(node_list: str) -> None:
    done = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True)
    assert expand_nodes(node_list) == done.stdout.split()


def test_partition_limits_are_numbers() -> None:
    for row in SlurmCli().partitions():
        assert row.max_time_s is None or row.max_time_s > 0
        assert len(expand_nodes(row.node_list)) == row.total_nodes
