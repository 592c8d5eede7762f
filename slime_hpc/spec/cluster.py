"""ClusterProfile: what a site offers, written once by whoever knows the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_hpc.spec.values import Memory, Strict

MAX_TEMP_DIR_BYTES = 45
"""Longest temp directory below which Ray can still make its sockets (sun_path holds 108 bytes)."""
MAX_SCRATCH_BYTES = MAX_TEMP_DIR_BYTES - 20
"""An agent's temp directory is ``SCRATCH/NAME``, the name at most 19 bytes."""


class Partition(Strict):
    """What one node of a partition has. Left out means unknown, and is then asked of the profile."""

    gpus_per_node: int | None = Field(default=None, ge=0)
    cpus_per_node: int | None = Field(default=None, ge=1)
    mem_per_node_mb: Memory | None = Field(default=None, alias="mem_per_node")
    max_nodes: int | None = Field(default=None, ge=1)


class ClusterProfile(Strict):
    """One Slurm cluster."""

    name: str
    description: str = ""
    device: Literal["cuda", "cpu"] = "cuda"
    """What trainers and engines compute on. ``cpu`` is for the devcluster; there is no fallback."""
    partitions: dict[str, Partition] = Field(default_factory=dict)
    """By name. A partition that is not listed may still be used; then sizes must stand in the profile."""
    scratch: str = "/tmp"
    """Node-local directory for sockets and caches, at most MAX_SCRATCH_BYTES long."""
    setup: tuple[str, ...] = ()
    """Shell lines every job of this site needs, before the profile's own."""

    def partition(self, name: str) -> Partition:
        """What is known of a partition: nothing, where it is not listed."""
        return self.partitions.get(name, Partition())
