"""The trainer's state on disk: model, optimizer, RNG and step, in megatron-core's torch_dist format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from slime_hpc.records import fsync_dir
from slime_hpc.types import ShardReport

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

State = dict[str, Any]

RANK0_FILES = ("common.pt", "metadata.json")
"""What megatron-core writes beside the shards, on rank 0."""


def save_state(directory: Path, model: GPTModel, optimizer: MegatronOptimizer, step: int) -> list[ShardReport]:
    """Write this rank's shards and report them, on disk for good when this returns. Collective."""
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    strategy = _InProcessSave()
    state = {**_sharded_state(model, optimizer, is_loading=False), "step": step}
    dist_checkpointing.save(state, str(directory), sharded_strategy=strategy)
    reports = strategy.file_system.reports()
    if torch.distributed.get_rank() == 0:
        reports += [_sync_and_report(directory / name) for name in RANK0_FILES]
    fsync_dir(directory)
    return reports


def load_state(directory: Path, model: GPTModel, optimizer: MegatronOptimizer) -> int:
    """Bring back what ``save_state`` saw on as many ranks, bit for bit. Returns the step. Collective."""
    state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(directory))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _set_rng_state(state["rng"])
    step: int = state["step"]
    return step


def _sharded_state(model: GPTModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> State:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    weights = model.sharded_state_dict(prefix="")
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading),
        "rng": ShardedObject("rng", _rng_state(), (size,), (rank,)),
    }


def _rng_state() -> State:
    return {
        "torch": torch.get_rng_state(),
        "model_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["model_parallel"])


class _InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's format, written by this very process.

    Its own writer starts a multiprocessing manager and forks a child for each file, also when saving
    synchronously: a second interpreter for each rank that stays behind, and forks in a process full of threads.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.file_system = _HashingFileSystem()

    def save(self, sharded_state_dict: State, checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True)
        writer.fs = self.file_system
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_distributed(mcore_to_pyt_state_dict(by_key), storage_writer=writer, planner=planner)


class _HashingFileSystem(FileSystem):
    """Checksums every file it writes as it is written, so that later damage is told from what was meant."""

    def __init__(self) -> None:
        self._reports: dict[Path, ShardReport] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
        self._reports[Path(path)] = ShardReport(Path(path).name, hashing.size, hashing.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        report = self._reports.pop(Path(path))
        self._reports[Path(new_path)] = ShardReport(Path(new_path).name, report.size, report.checksum)

    def reports(self) -> list[ShardReport]:
        return list(self._reports.values())


class _HashingStream:
    """A file that is only ever appended to."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size += len(memoryview(data).cast("B"))
        written: int = self._stream.write(data)
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        number: int = self._stream.fileno()
        return number

    def close(self) -> None:
        self._stream.close()


def _sync_and_report(path: Path) -> ShardReport:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    return ShardReport(path.name, len(data), xxhash.xxh3_128_hexdigest(data))
