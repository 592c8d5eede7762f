"""SlurmCli against a real slurmctld."""

from __future__ import annotations

import pytest

from slime_hpc.slurm.commands import SlurmCli
from slime_hpc.testing.slurm_contract import SlurmContract


@pytest.mark.usefixtures("devcluster")
class TestRealSlurm(SlurmContract):
    @pytest.fixture
    def slurm(self) -> SlurmCli:
        return SlurmCli()
