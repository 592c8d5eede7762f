"""Publishing a model's weights to a real engine, against a plain broadcast of the same bytes.

    python -m benchmarks.weight_sync MODEL_DIR [--bucket-mib 512 64 …]

Ours is what a run does after each round: gather under HF names in a real trainer rank, pause the engine, send, load,
acknowledge, go on. The baseline is one torch.distributed.broadcast of one tensor of as many bytes over gloo, from this
process into memory that another one of this host already has.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from benchmarks.engine import HOST, model_plan, running_engine
from benchmarks.pairs import Pairs, alternate, table
from slime_hpc.rollout.client import EngineClient
from slime_hpc.trainer.ranks import TrainerRank
from slime_hpc.types import TensorMeta, WeightReceiver, WeightVersion
from slime_hpc.weight_sync.buckets import buckets, num_bytes
from slime_hpc.weight_sync.channel import WeightChannel
from slime_hpc.weight_sync.distributed import WeightSender

DEADLINE_S = 120.0
MIB = 1024**2


class LocalTrainer:
    """``weight_sync.channel.WeightSource``: rank 0 in this process, as its Ray actor has it."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._sender: WeightSender | None = None

    async def listen(self) -> tuple[str, int]:
        self._sender = WeightSender(HOST, timeout_s=DEADLINE_S)
        return HOST, self._sender.port

    async def join(self, world_size: int, group_name: str) -> None:
        assert self._sender is not None
        await asyncio.to_thread(self._sender.join, world_size=world_size, group_name=group_name, backend="gloo")

    async def broadcast(self) -> None:
        assert self._sender is not None
        await asyncio.to_thread(self._sender.broadcast, self._rank.named_hf_tensors())

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class OneEngine:
    """``weight_sync.channel.Membership``."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def serving(self) -> Sequence[WeightReceiver]:
        return [self._client]

    def drop(self, url: str, why: str) -> None:
        raise RuntimeError(f"the engine is lost: {why}")


class Publisher:
    """Publishes one version after the other in buckets of one size, over a group that stays."""

    def __init__(self, channel: WeightChannel, runner: asyncio.Runner) -> None:
        self._channel = channel
        self._runner = runner
        self._number = 0

    def __call__(self) -> float:
        """Seconds."""
        self._number += 1
        began = time.perf_counter()
        self._runner.run(self._channel.publish(WeightVersion(1, self._number)))
        return time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self._channel._leave(self._channel._engines.serving()))


class Receiver:
    """A process with memory for ``size`` bytes, into which this one broadcasts."""

    def __init__(self, size: int) -> None:
        self._data = torch.ones(size, dtype=torch.uint8)
        store = TCPStore(HOST, 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_receive, args=(store.port, size, theirs), daemon=True)
        self._process.start()
        self._group = _two_ranks(store, 0)

    def __call__(self) -> float:
        """Seconds until the receiver has everything."""
        began = time.perf_counter()
        dist.broadcast(self._data, group=self._group, group_src=0)
        self._pipe.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _receive(port: int, size: int, pipe: Connection) -> None:
    store = TCPStore(HOST, port, 2, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    group = _two_ranks(store, 1)
    data = torch.zeros(size, dtype=torch.uint8)
    while True:
        dist.broadcast(data, group=group, group_src=0)
        pipe.send("received")


def _two_ranks(store: Store, rank: int) -> dist.ProcessGroup:
    """Made as the product makes its group, beside a default one that may exist."""
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=3600)  # the receiver waits while the other side of a pair runs
    group, _ = c10d._new_process_group_helper(
        2, rank, [], dist.Backend("gloo"), store, group_name=c10d.GroupName("plain"), timeout=timeout
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


@contextmanager
def trainer(rank: TrainerRank) -> Iterator[LocalTrainer]:
    rank.setup(*rank.rendezvous(HOST))
    yield LocalTrainer(rank)
    rank.shutdown()


def measure(
    source: LocalTrainer,
    client: EngineClient,
    runner: asyncio.Runner,
    metas: Sequence[TensorMeta],
    bucket: int,
    receiver: Receiver,
) -> Pairs:
    """The same bytes both ways."""
    channel = WeightChannel(
        source,
        OneEngine(client),
        list(buckets(metas, bucket)),
        attempt=1,
        ranks_per_engine=1,
        backend="gloo",
        deadline_s=DEADLINE_S,
    )
    publisher = Publisher(channel, runner)
    pairs = alternate(f"buckets of {bucket // MIB} MiB: weight sync; plain broadcast", "s", publisher, receiver)
    publisher.close()
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[512, 64])
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner() as runner:
        plan = model_plan(arguments.model, Path(scratch) / "run")
        rank = TrainerRank(plan, 0, 1)
        with running_engine(plan) as engine, trainer(rank) as source:
            print(f"engine started in {engine.started_s:.1f} s", flush=True)
            metas = rank.weight_metas()
            print(f"{sum(map(num_bytes, metas)) / 1e6:.0f} MB in {len(metas)} tensors", flush=True)
            client = runner.run(engine.client().__aenter__())
            receiver = Receiver(sum(map(num_bytes, metas)))
            for mib in arguments.bucket_mib:
                print(table([measure(source, client, runner, metas, mib * MIB, receiver)]), flush=True)
            receiver.close()
            runner.run(client.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
