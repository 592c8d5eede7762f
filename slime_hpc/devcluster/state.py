"""What a devcluster remembers about itself (``state.json``), and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slime_hpc.devcluster.config import Shape
from slime_hpc.devcluster.daemons import ProcessRecord
from slime_hpc.devcluster.network import Network, network_from_json
from slime_hpc.errors import ClusterError
from slime_hpc.records import read_json, write_json


@dataclass
class Record:
    """What was asked, where it lives and which processes were started."""

    shape: Shape
    network: Network
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    complete: bool = False
    """Its first start came to its end: database and accounts exist, and a dead daemon can be started again."""

    @classmethod
    def load(cls, path: Path) -> Record:
        """ClusterError if another version wrote it, or something damaged it."""
        try:
            value = read_json(path)
            shape = Shape(**value["shape"])
            processes = {name: ProcessRecord(**process) for name, process in value["processes"].items()}
            return cls(shape, network_from_json(value["network"], shape.nodes), processes, value["complete"])
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(
                f"{path} is damaged or of another version ({error!r}); "
                f"take that devcluster down: slime-hpc devcluster down --dir {path.parent}"
            ) from error

    def save(self, path: Path) -> None:
        value = {
            "shape": asdict(self.shape),
            "network": self.network.to_json(),
            "processes": {name: asdict(process) for name, process in self.processes.items()},
            "complete": self.complete,
        }
        write_json(path, value)


@dataclass(frozen=True)
class DaemonStatus:
    name: str
    pid: int | None
    alive: bool


@dataclass(frozen=True)
class NodeStatus:
    """``state`` is Slurm's own word; None where the controller does not answer."""

    name: str
    partition: str
    address: str
    state: str | None


@dataclass(frozen=True)
class Status:
    """``up``: every daemon is alive and the controller answers. ``partial``: some are. ``down``: none is."""

    dir: Path
    slurm_conf: Path
    state: Literal["up", "partial", "down"] = "down"
    shape: Shape | None = None
    network: str | None = None
    note: str = ""
    daemons: tuple[DaemonStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()

    def to_json(self) -> dict[str, Any]:
        partitions = {name: list(nodes) for name, nodes in self.shape.partitions.items()} if self.shape else {}
        return {**asdict(self), "dir": str(self.dir), "slurm_conf": str(self.slurm_conf), "partitions": partitions}
