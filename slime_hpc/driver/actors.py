"""The Ray actors: one a trainer rank, one an engine. Each is placed by its role's raylet resource."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray.exceptions import RayTaskError

from slime_hpc.device import get_device
from slime_hpc.errors import ClusterError, UserError
from slime_hpc.plan import JobPlan
from slime_hpc.rollout.engine import EngineServer
from slime_hpc.run_dir import RunDir
from slime_hpc.trainer.ranks import TrainerRank
from slime_hpc.types import Role, ShardReport, TensorMeta, TrainBatch
from slime_hpc.weight_sync.distributed import WeightSender


class TrainerActor:
    """Rank ``rank`` of the trainer; rank 0 also sends the weights."""

    def __init__(self, plan_json: str, rank: int) -> None:
        plan = JobPlan.model_validate_json(plan_json)
        _redirect_output(plan, f"trainer-{rank}")
        self._plan = plan
        self._host: str = ray.util.get_node_ip_address()
        self._rank = TrainerRank(plan, rank, plan.trainer_ranks)
        self._sender: WeightSender | None = None

    def ping(self) -> None:
        """Answered while the process lives and is not at work."""

    def node(self) -> str:
        """Slurm's name of the node this runs on."""
        return os.uname().nodename

    def rendezvous(self) -> tuple[str, int]:
        """Where the ranks meet: rank 0's address and port."""
        return self._rank.rendezvous(self._host)

    def setup(self, host: str, port: int) -> list[TensorMeta]:
        """Join the other ranks and load the model. Returns what ``broadcast`` will send, in order."""
        self._rank.setup(host, port)
        return self._rank.weight_metas()

    def listen_for_engines(self, timeout_s: float) -> tuple[str, int]:
        """Where the engines of a new weight group find its rank 0."""
        self._sender = WeightSender(self._host, timeout_s=timeout_s)
        return self._host, self._sender.port

    def join_engines(self, world_size: int, group_name: str) -> None:
        assert self._sender is not None
        backend = get_device(self._plan.cluster.device).backend
        self._sender.join(world_size=world_size, group_name=group_name, backend=backend)

    def broadcast(self) -> None:
        """Gather the weights under HF names (every rank takes part) and send them from rank 0."""
        tensors = self._rank.named_hf_tensors()
        try:
            if self._sender is not None:
                self._sender.broadcast(tensors)
        finally:
            for _ in tensors:
                continue  # gathered as it is iterated: the other ranks wait for our part, also if sending failed

    def leave_engines(self) -> None:
        """Leave the weight group, if there is one."""
        if self._sender is not None:
            self._sender.close()

    def train(self, batch: TrainBatch) -> dict[str, float]:
        return self._rank.train(batch)

    def save(self, directory: Path) -> list[ShardReport]:
        return self._rank.save(directory)

    def load(self, directory: Path) -> None:
        self._rank.load(directory)

    def export_hf(self, directory: Path) -> None:
        self._rank.export_hf(directory)

    def step(self) -> int:
        return self._rank.step


class EngineActor:
    """Holds engine ``index``: a child of this process, which dies with it."""

    def __init__(self, plan_json: str, index: int) -> None:
        plan = JobPlan.model_validate_json(plan_json)
        _redirect_output(plan, f"engine-actor-{index}")
        self._server = EngineServer(plan, index, ray.util.get_node_ip_address())

    def ping(self) -> None:
        """Answered while the process lives and is not at work."""

    def node(self) -> str:
        """Slurm's name of the node this runs on."""
        return os.uname().nodename

    def start(self) -> tuple[str, int]:
        """URL and pid of the server, which is not serving yet."""
        return self._server.start(), self._server.pid

    def wait_healthy(self, deadline_s: float) -> None:
        self._server.wait_healthy(deadline_s)

    def poll(self) -> int | None:
        """The server's exit status; None while it runs."""
        return self._server.poll()

    def kill(self) -> None:
        self._server.kill()


def _redirect_output(plan: JobPlan, who: str) -> None:
    """Into the attempt's own log: a worker's log in Ray's temporary directory is gone with the job."""
    path = RunDir(plan.run_dir).attempt(plan.attempt).log(who)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())


def kill_actor(actor: Any) -> None:
    """End its process, and with it the engine it holds. Returns at once: the call into Ray may block."""
    threading.Thread(target=ray.kill, args=(actor,), name="kill", daemon=True).start()


class ActorFailed(ClusterError):
    """An actor's method raised something that is not the user's to mend; the driver's log has its traceback."""

    def __init__(self, role: Role, cause: BaseException) -> None:
        self.role = role
        super().__init__(f"the {role} failed: {type(cause).__name__}: {cause}")


async def gather(role: Role, refs: Sequence[Any]) -> list[Any]:
    """Results of calls of one role's actors, in order; the first failure is raised.

    UserError as it was raised, ActorFailed for other exceptions, RayActorError for an actor that is gone.
    """
    try:
        return list(await asyncio.gather(*(asyncio.wrap_future(ref.future()) for ref in refs)))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from error
        raise ActorFailed(role, error.cause) from error
