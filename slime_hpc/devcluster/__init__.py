"""A real Slurm on one machine, under one directory: for trying things, and for the tests."""

from slime_hpc.devcluster.cluster import DevCluster, default_dir
from slime_hpc.devcluster.config import Shape
from slime_hpc.devcluster.state import Status

__all__ = ["DevCluster", "Shape", "Status", "default_dir"]
