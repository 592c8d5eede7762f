"""A real Slurm for the whole session. Without Slurm or root, tests here fail: they never skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devclusters import RunningDevCluster, boot, take_down

from slime_hpc.testing.tiny_model import make_tiny_qwen3


@pytest.fixture(scope="session")
def devcluster() -> Iterator[RunningDevCluster]:
    """With accounting; SLURM_CONF points at it for the session."""
    cluster = boot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.dir / "etc" / "slurm.conf"))
        yield cluster
    take_down(cluster)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_qwen3(directory)
    return directory
