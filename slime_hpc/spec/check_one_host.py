"""What ``slime-hpc run`` cannot give, since it has one host and no Slurm."""

from __future__ import annotations

from collections.abc import Iterator

from slime_hpc.errors import Finding
from slime_hpc.spec.cluster import ClusterProfile
from slime_hpc.spec.run import RunSpec


def check_one_host(spec: RunSpec, cluster: ClusterProfile) -> Iterator[Finding]:
    """Of a checked profile: what keeps all its roles from running on this host."""
    for role, component in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        if component.nodes > 1:
            yield Finding(
                f"{role}.nodes",
                f"is {component.nodes}, but `slime-hpc run` has this host only; set it to 1, or use `slime-hpc submit`",
            )
    if cluster.device != "cpu":
        yield Finding(
            "cluster",
            f"{cluster.name!r} has `device: {cluster.device}`, but `slime-hpc run` does not share out a host's GPUs "
            "among the roles; use `slime-hpc submit`, or a cluster profile with `device: cpu`",
        )
