"""How an attempt's processes are started: as steps of its Slurm job, or as children on this host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Protocol

from slime_hpc.plan import JobPlan
from slime_hpc.processes import kill_with_parent
from slime_hpc.render import in_environment
from slime_hpc.slurm.allocation import Allocation
from slime_hpc.slurm.commands import SlurmCli
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.slurm.steps import Step
from slime_hpc.supervisor.address import ONE_HOST, node_name
from slime_hpc.supervisor.cause import Cause, Ending
from slime_hpc.supervisor.raylet import LOOPBACK_ENV
from slime_hpc.types import Role


class Launcher(Protocol):
    """What a supervisor needs of the place it runs in."""

    allocation: Allocation

    @property
    def agents(self) -> Sequence[Sequence[Role]]:
        """Steps of agents to start, each by the roles that its nodes have. A step is known by the first."""

    def start_step(self, step: Step) -> subprocess.Popen[bytes]:
        """A process that runs as long as the step does."""

    def queue(self) -> list[QueueRow]:
        """What Slurm shows of the job; empty without Slurm. ClusterError if it cannot be asked."""

    def ending_of(self, number: signal.Signals, cancelled_by: str | None) -> Ending | None:
        """What a signal to the supervisor means; None where Slurm's records are to tell."""


class SlurmLauncher:
    """Steps of the job this process is in. ClusterError outside of one."""

    agents = ((Role.TRAINER,), (Role.ROLLOUT,))

    def __init__(self) -> None:
        self.allocation = Allocation.from_environ(os.environ)

    def start_step(self, step: Step) -> subprocess.Popen[bytes]:
        return SlurmCli().start_step(step)

    def queue(self) -> list[QueueRow]:
        assert self.allocation.job_id is not None
        return SlurmCli(timeout_s=3.0).queue([self.allocation.job_id])

    def ending_of(self, number: signal.Signals, cancelled_by: str | None) -> Ending | None:
        return None


class LocalLauncher:
    """Children of this process, on loopback. Who makes one ends its descendants afterwards (``sweep``)."""

    agents = ((Role.TRAINER, Role.ROLLOUT),)

    def __init__(self, plan: JobPlan) -> None:
        self.allocation = Allocation.of_one_host(node_name(), len(plan.components))
        self._plan = plan

    def start_step(self, step: Step) -> subprocess.Popen[bytes]:
        with open(step.output, "ab") as output:
            return subprocess.Popen(
                in_environment(self._plan, step.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, ONE_HOST: "1", **LOOPBACK_ENV},
                start_new_session=True,  # a terminal's Ctrl-C is ours to hear, and kills a raylet at once
                # An agent sees by itself that we are gone, and still has its node to clear.
                preexec_fn=kill_with_parent if step.overlap else None,  # noqa: PLW1509 - made for it
            )

    def queue(self) -> list[QueueRow]:
        return []

    def ending_of(self, number: signal.Signals, cancelled_by: str | None) -> Ending | None:
        if cancelled_by:
            return Ending(Cause.CANCELLED, f"cancelled with `slime-hpc cancel` by {cancelled_by}")
        how = "Ctrl-C" if number is signal.SIGINT else number.name
        return Ending(Cause.CANCELLED, f"ended by {how}")
