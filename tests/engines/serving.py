"""What the tests of a real SGLang server share: its plan, the server beside its model, the trainer's side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_hpc.plan import JobPlan
from slime_hpc.rollout.client import EngineClient, EngineError, EngineKeys
from slime_hpc.rollout.engine import EngineServer
from slime_hpc.rollout.router import Router
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.run_dir import AttemptDir, RunDir
from slime_hpc.types import TensorMeta, WeightVersion
from slime_hpc.weight_sync.buckets import buckets
from slime_hpc.weight_sync.distributed import WeightSender
from slime_hpc.weight_sync.transaction import connect, group_name, publish

HOST = "127.0.0.1"
KEYS = EngineKeys(api_key="user-key-5d1f", admin_api_key="admin-key-9c3e")
START_DEADLINE_S = 300.0
SYNC_DEADLINE_S = 30.0
BUCKET_BYTES = 64 * 1024
"""Less than the tiny model has, so that every publication takes several requests."""


def make_plan(run_dir: Path, model: Path, **sglang: Any) -> JobPlan:
    """A job of one trainer node and one rollout node without GPUs."""

    def component(index: int, role: str) -> dict[str, Any]:
        size = {"nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1}
        return {"index": index, "role": role, "partition": role, "time_limit_s": 600, "options": {}, **size}

    spec = {
        "name": "tiny",
        "cluster": "devcluster",
        "run_dir": run_dir,
        "time_limit": 10,
        "num_rollout": 1,
        "model": {"hf_checkpoint": model},
        "trainer": {"partition": "trainer"},
        "rollout": {"partition": "rollout", "sglang": sglang},
        "data": {"prompt_data": run_dir / "prompts.jsonl"},
        "sampling": {"rollout_batch_size": 1, "rollout_max_response_len": 8},
        "reward": {"custom_rm_path": "m.f"},
    }
    return JobPlan.model_validate(
        {
            "tool_version": "0",
            "token": "test",
            "attempt": 1,
            "run_dir": run_dir,
            "profile_dir": run_dir,
            "python": "python",
            "engine_python": "python",
            "setup": [],
            "components": [component(0, "trainer"), component(1, "rollout")],
            "spec": spec,
            "cluster": {"name": "devcluster", "device": "cpu"},
        }
    )


def make_attempt(run_dir: Path) -> AttemptDir:
    """Attempt 1 with its keys, as the supervisor leaves it."""
    attempt = RunDir(run_dir).attempt(1)
    attempt.secrets.mkdir(parents=True, mode=0o700)
    attempt.engine_keys.touch(mode=0o600)
    attempt.engine_keys.write_text(json.dumps({"api_key": KEYS.api_key, "admin_api_key": KEYS.admin_api_key}))
    return attempt


@dataclass
class Engine:
    """The running server with a router before it, and ``model``, whose weights it serves."""

    server: EngineServer
    router: RouterServer
    attempt: AttemptDir
    model: torch.nn.Module

    def client(self) -> EngineClient:
        return EngineClient(self.server.url, KEYS)

    @asynccontextmanager
    async def routed(self) -> AsyncIterator[Router]:
        """The way to it through the router. It is not to fall silent."""

        def fail(error: EngineError) -> None:
            raise error

        async with self.client() as client, self.router.client() as api:
            router = Router(api, fail)
            await router.admit([client])
            yield router

    def reference_log_probs(self, tokens: Sequence[int], response_length: int, temperature: float = 1.0) -> list[float]:
        """What transformers says about the last ``response_length`` tokens."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0] / temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return log_probs[len(log_probs) - response_length :].tolist()  # type: ignore[no-any-return]


@dataclass
class WeightGroup:
    """The trainer's side of weight sync, standing in for trainer rank 0."""

    engine: Engine
    membership: int
    sender: WeightSender = field(default_factory=lambda: WeightSender(HOST, timeout_s=SYNC_DEADLINE_S))
    published: int = -1

    @property
    def name(self) -> str:
        return group_name(1, self.membership)

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(1, self.published)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.detach()) for name, p in self.engine.model.named_parameters()]

    async def connect(self, client: EngineClient) -> None:
        async def join(world_size: int) -> None:
            await asyncio.to_thread(self.sender.join, world_size=world_size, group_name=self.name, backend="gloo")

        await connect(
            [client],
            join,
            host=HOST,
            port=self.sender.port,
            ranks_per_engine=1,
            group_name=self.name,
            backend="gloo",
            deadline_s=SYNC_DEADLINE_S,
        )

    async def publish(self, client: EngineClient, deadline_s: float = SYNC_DEADLINE_S) -> None:
        """Push the model as it is now, as the next version."""
        self.published += 1
        named = self.tensors()
        metas = [TensorMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in named]
        await publish(
            [client],
            lambda: asyncio.to_thread(self.sender.broadcast, named),
            list(buckets(metas, BUCKET_BYTES)),
            version=self.version,
            group_name=self.name,
            deadline_s=deadline_s,
        )
