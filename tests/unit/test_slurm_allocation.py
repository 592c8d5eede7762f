from __future__ import annotations

import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.slurm.allocation import Allocation, ComponentAllocation
from slime_hpc.types import JobId


def het(word: str = "HET") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", f"SLURM_{word}_SIZE": "2",
        f"SLURM_JOB_ID_{word}_GROUP_0": "12", f"SLURM_JOB_NODELIST_{word}_GROUP_0": "n[1-2]",
        f"SLURM_JOB_ID_{word}_GROUP_1": "13", f"SLURM_JOB_NODELIST_{word}_GROUP_1": "n3",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["HET", "PACK"])
def test_a_het_job(word: str) -> None:
    allocation = Allocation.from_environ(het(word) | {"SLURM_RESTART_COUNT": "3"})
    assert allocation.job_id == JobId(12)
    assert allocation.components == (ComponentAllocation(12, ("n1", "n2")), ComponentAllocation(13, ("n3",)))
    assert (allocation.batch_node, allocation.restart_count) == ("n1", 3)


def test_a_step_of_component_1_sees_the_same_job() -> None:
    """There the plain variables are the component's own."""
    assert Allocation.from_environ(het() | {"SLURM_JOB_NODELIST": "n3"}) == Allocation.from_environ(het())


def test_a_plain_job() -> None:
    allocation = Allocation.from_environ({"SLURM_JOB_ID": "20", "SLURM_JOB_NODELIST": "n[4-5]"})
    assert allocation.components == (ComponentAllocation(20, ("n4", "n5")),)
    assert allocation.restart_count == 0


def test_outside_of_a_job() -> None:
    with pytest.raises(ClusterError, match=r"SLURM_JOB_ID is not set.*slime-hpc submit"):
        Allocation.from_environ({"PATH": "/bin"})


def test_a_missing_variable_is_named() -> None:
    environ = het()
    del environ["SLURM_JOB_NODELIST_HET_GROUP_1"]
    with pytest.raises(ClusterError, match="did not set SLURM_JOB_NODELIST_HET_GROUP_1"):
        Allocation.from_environ(environ)
