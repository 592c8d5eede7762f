"""Fakes and contract suites for tests of hooks and tools that are built on slime_hpc."""

from slime_hpc.testing.fake_slurm import FakeSlurm

__all__ = ["FakeSlurm"]
