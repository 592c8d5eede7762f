"""FakeSlurm answers as Slurm does; tests/slurm/test_slurm_contract.py holds the real one to the same suite."""

from __future__ import annotations

import pytest

from slime_hpc.slurm.commands import Slurm
from slime_hpc.testing import FakeSlurm
from slime_hpc.testing.slurm_contract import SlurmContract
from slime_hpc.types import JobId


class TestFakeSlurm(SlurmContract):
    @pytest.fixture
    def slurm(self) -> FakeSlurm:
        return FakeSlurm()

    def start(self, slurm: Slurm, job_id: JobId) -> None:
        assert isinstance(slurm, FakeSlurm)
        slurm.set_state(job_id, "RUNNING")
