"""What a process inside a job sees of it, read from the variables Slurm sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_hpc.errors import ClusterError
from slime_hpc.slurm.hosts import expand_nodes
from slime_hpc.types import JobId


@dataclass(frozen=True)
class ComponentAllocation:
    """The nodes one component got."""

    job_id: int | None
    """Slurm's own number of the component; signals and queries about it alone take this. None without Slurm."""
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Allocation:
    """The whole job, whichever component's process looks at it."""

    job_id: JobId | None
    """The leader's; None without Slurm."""
    components: tuple[ComponentAllocation, ...]
    restart_count: int
    """0 in the job's first life."""

    @property
    def job_text(self) -> str | None:
        """The job's id as records hold it."""
        return None if self.job_id is None else str(self.job_id)

    @property
    def batch_node(self) -> str:
        """Where the batch script runs: the leader's first node."""
        return self.components[0].nodes[0]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Allocation:
        """ClusterError outside of a job, or where Slurm left a variable out."""
        if "SLURM_JOB_ID" not in environ:
            raise ClusterError(
                "SLURM_JOB_ID is not set: this runs inside a Slurm job only; start it with `slime-hpc submit`"
            )
        components = tuple(_components(environ))
        leader = components[0].job_id
        assert leader is not None
        return cls(JobId(leader), components, int(environ.get("SLURM_RESTART_COUNT", "0")))

    @classmethod
    def of_one_host(cls, node: str, components: int) -> Allocation:
        """No job: every component is on the same host."""
        return cls(None, (ComponentAllocation(None, (node,)),) * components, 0)


def _components(environ: Mapping[str, str]) -> list[ComponentAllocation]:
    for prefix in ("HET", "PACK"):  # PACK: its name before Slurm 20.02
        size = environ.get(f"SLURM_{prefix}_SIZE")
        if size is not None:
            return [_component(environ, f"_{prefix}_GROUP_{index}") for index in range(int(size))]
    return [_component(environ, "")]


def _component(environ: Mapping[str, str], suffix: str) -> ComponentAllocation:
    job_id, nodes = f"SLURM_JOB_ID{suffix}", f"SLURM_JOB_NODELIST{suffix}"
    missing = [name for name in (job_id, nodes) if not environ.get(name)]
    if missing:
        raise ClusterError(
            f"Slurm did not set {' and '.join(missing)} in this job; was the environment cleared on the way?"
        )
    return ComponentAllocation(int(environ[job_id]), tuple(expand_nodes(environ[nodes])))
