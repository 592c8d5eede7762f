"""Weights from a trainer's process into a real SGLang server, over a real gloo group."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
import torch
from serving import HOST, Engine, WeightGroup

from slime_hpc.weight_sync.distributed import WeightSender
from slime_hpc.weight_sync.transaction import WeightSyncError

TOLERANCE = 1e-5
PROMPT = [5, 17, 42, 99]

PEER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
port, name = int(sys.argv[1]), sys.argv[2]
store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=60)))
print("here", flush=True)
group, _ = c10d._new_process_group_helper(3, 1, [], dist.Backend("gloo"), store, name, timeout=timedelta(seconds=60))
print("joined", flush=True)
time.sleep(600)
"""


def change(model: torch.nn.Module, seed: int) -> None:
    """Another policy: every matrix moves by about its own size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


async def mismatch(engine: Engine) -> float:
    """Largest difference between the engine's log-probs and those of the model."""
    async with engine.client() as client:
        done = await client.generate(PROMPT, {"max_new_tokens": 16, "ignore_eos": True})
    expected = engine.reference_log_probs([*PROMPT, *done.tokens], 16)
    return max(abs(a - b) for a, b in zip(done.log_probs, expected, strict=True))


def test_published_weights_are_the_ones_served(weights: WeightGroup) -> None:
    engine = weights.engine

    async def rounds() -> None:
        async with engine.client() as client:
            for seed in (1, 2):
                before, checksum = weights.version, await client.weights_checksum()
                change(engine.model, seed)
                assert await mismatch(engine) > 0.01, "not published yet, so it must still serve the old weights"
                assert await client.weight_version() == str(before)
                await weights.publish(client)
                assert await mismatch(engine) <= TOLERANCE
                assert await client.weight_version() == str(weights.version) == f"a1.v{before.number + 1}"
                published = await client.weights_checksum()
                assert published != checksum
                await weights.publish(client)
                assert await client.weights_checksum() == published, "the same weights have the same"

    asyncio.run(rounds())


def test_cached_prefixes_do_not_outlive_their_weights(weights: WeightGroup) -> None:
    async def same_prompt_twice() -> None:
        async with weights.engine.client() as client:
            assert await mismatch(weights.engine) <= TOLERANCE
            change(weights.engine.model, 3)
            await weights.publish(client)
            assert await mismatch(weights.engine) <= TOLERANCE

    asyncio.run(same_prompt_twice())


def test_closing_our_side_frees_an_engine_whose_group_lost_a_member(weights: WeightGroup) -> None:
    """Trainer, a peer, and the engine as the last rank; the peer dies before the broadcast."""
    engine = weights.engine
    group = WeightGroup(engine, membership=7, published=weights.published)
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(group.sender.port), group.name], stdout=subprocess.PIPE, text=True
    )

    async def fail_and_recover() -> None:
        async with engine.client() as client:
            await asyncio.gather(
                asyncio.to_thread(group.sender.join, world_size=3, group_name=group.name, backend="gloo"),
                client.init_weights_group(
                    host=HOST,
                    port=group.sender.port,
                    rank_offset=2,
                    world_size=3,
                    group_name=group.name,
                    backend="gloo",
                ),
            )
            peer.kill()
            peer.wait()
            change(engine.model, 4)
            with pytest.raises(WeightSyncError) as caught:
                await group.publish(client)
            assert caught.value.phase == "transfer"
            assert "the trainer" in caught.value.who
            group.sender.close()
            await asyncio.wait_for(client.abandon_weight_update(group.name), 20)
            assert await client.weight_version() == str(weights.version), "what was not received is not served"
            await weights.publish(client)
            assert await mismatch(engine) <= TOLERANCE

    try:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "here\n"
        asyncio.run(fail_and_recover())
    finally:
        peer.kill()
        peer.wait()


def test_a_group_nobody_joins_is_given_up_in_time() -> None:
    sender = WeightSender(HOST, timeout_s=2)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        sender.join(world_size=2, group_name="lonely", backend="gloo")
    assert 1 < time.monotonic() - started < 20
    sender.close()


def test_nothing_is_sent_over_a_group_that_is_not_joined() -> None:
    sender = WeightSender(HOST, timeout_s=2)
    with pytest.raises(RuntimeError, match="broadcast without join"):
        sender.broadcast([("w", torch.zeros(1))])
    sender.close()
    with pytest.raises(RuntimeError, match="join after close"):
        sender.join(world_size=2, group_name="late", backend="gloo")
