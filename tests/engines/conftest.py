"""One real SGLang server for the whole session, beside the transformers model whose weights it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import HOST, START_DEADLINE_S, Engine, WeightGroup, make_attempt, make_plan
from transformers import AutoModelForCausalLM

from slime_hpc.rollout.engine import EngineServer
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.testing.tiny_model import make_tiny_qwen3


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_qwen3(directory)
    return directory


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("run")
    attempt = make_attempt(run_dir)
    plan = make_plan(run_dir, tiny_model)
    server, router = EngineServer(plan, 0, HOST), RouterServer(plan)
    server.start()
    router.start()
    try:
        server.wait_healthy(START_DEADLINE_S)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
        yield Engine(server, router, attempt, model)
    finally:
        router.kill()
        server.kill()  # raises if a process of it stays


@pytest.fixture(scope="session")
def weights(engine: Engine) -> Iterator[WeightGroup]:
    """A group with the engine in it, and version 0 published: the state in which rounds begin."""
    group = WeightGroup(engine, membership=0)

    async def begin() -> None:
        async with engine.client() as client:
            await group.connect(client)
            await group.publish(client)

    asyncio.run(begin())
    yield group
    group.sender.close()
