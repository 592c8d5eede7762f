"""Job steps: the ``srun`` lines a supervisor starts inside an allocation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One task on each of ``nodes`` of one component, seeing all of that node's GPUs."""

    name: str
    component: int
    nodes: Sequence[str]
    cpus_per_task: int
    command: Sequence[str]
    output: Path
    """Of srun and of the tasks before they redirect themselves."""
    overlap: bool = False
    """Share the nodes with a running step, and take no GPUs."""

    def argv(self) -> list[str]:
        """One task's end never ends the others (``--kill-on-bad-exit=0 --wait=0``)."""
        options = [
            f"--job-name={self.name}",
            f"--het-group={self.component}",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={len(self.nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(self.nodes)}",
            f"--cpus-per-task={self.cpus_per_task}",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--input=none",
            "--unbuffered",
            "--open-mode=append",
            f"--output={self.output}",
        ]
        if self.overlap:
            options += ["--overlap", "--gres=none"]
        return ["srun", *options, *self.command]
