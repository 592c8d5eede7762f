"""The trainer's state on disk: model, optimizer, RNG and step, in megatron-core's torch_dist format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from slime_hpc.errors import ClusterError, SlimeHpcError, UserError
from slime_hpc.records import fsync_dir
from slime_hpc.types import LoadedState, ShardReport

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

State = dict[str, Any]

MAX_SEED = 1 << 31
"""megatron-core adds a few thousand to a seed, and torch takes 64 bits."""

DISTRIBUTED_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
"""The form that loads in another layout; the memory-efficient one is gathered by gloo."""

RANK0_FILES = ("common.pt", "metadata.json")
"""What megatron-core writes beside the shards, on rank 0."""


def save_state(directory: Path, model: GPTModel, optimizer: MegatronOptimizer, step: int) -> list[ShardReport]:
    """Write this rank's shards and report them, on disk for good when this returns. Collective."""
    assert step, "Adam has no moments to save before its first step"
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    strategy = _InProcessSave()
    state = {
        **_sharded_state(model, optimizer, is_loading=False),
        "rng": _sharded_rng(),
        "step": step,
        "layout": _layout(),
        "use_distributed_optimizer": optimizer.config.use_distributed_optimizer,
    }
    dist_checkpointing.save(state, str(directory), sharded_strategy=strategy)
    reports = strategy.file_system.reports()
    if torch.distributed.get_rank() == 0:
        reports += [_sync_and_report(directory / name) for name in RANK0_FILES]
    fsync_dir(directory)
    return reports


def load_state(directory: Path, model: GPTModel, optimizer: MegatronOptimizer, seed: int) -> LoadedState:
    """Bring back what ``save_state`` saw, bit for bit, whatever the layout of the ranks was. Collective.

    Random states belong to a layout: another one gets new ones, which follow from ``seed`` and the step.
    Hyperparameters of the optimizer stay as they are: the profile of today decides.
    ClusterError if files are missing or unreadable.
    """
    hyperparameters = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in optimizer.param_groups]
    with _damage_named(directory):
        saved = dist_checkpointing.load_common_state_dict(str(directory))
        step: int = saved["step"]
        same_layout: bool = saved["layout"] == _layout()
        _require_kind(optimizer, saved["use_distributed_optimizer"])
        wanted = _sharded_state(model, optimizer, is_loading=True) | ({"rng": _sharded_rng()} if same_layout else {})
        state = dist_checkpointing.load(wanted, str(directory))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for group, own in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update(own)
    if same_layout:
        _set_rng_state(state["rng"])
    else:
        seed_rng(xxhash.xxh32_intdigest(f"{seed} {step}".encode()) % MAX_SEED)
    return LoadedState(step, "restored" if same_layout else "reseeded")


def seed_rng(seed: int) -> None:
    """Seed every generator: torch's alike on all ranks, the model-parallel one by tensor-parallel rank."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


@contextmanager
def _damage_named(directory: Path) -> Iterator[None]:
    try:
        yield
    except SlimeHpcError:
        raise
    except (Exception, CheckpointException) as error:  # many libraries read it; what they raise says what is broken
        first = _first_failure(error)
        reason = f"{type(first).__name__}: {first}".partition("\n")[0]
        raise ClusterError(
            f"checkpoint {directory} cannot be loaded: {reason}; move it away to use an older one"
        ) from error


def _first_failure(error: BaseException) -> BaseException:
    """torch's exception lists each rank's with its traceback: one of them says enough."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _require_kind(optimizer: MegatronOptimizer, saved: bool) -> None:
    now = optimizer.config.use_distributed_optimizer
    if now != saved:
        raise UserError(
            f"trainer.megatron.use_distributed_optimizer is {json.dumps(now)}, and was {json.dumps(saved)} when the"
            " checkpoint was saved; set it to what it was"
        )


def _layout() -> dict[str, int]:
    """How the ranks share model and data."""
    return {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }


def _sharded_state(model: GPTModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> State:
    weights = model.sharded_state_dict(prefix="")
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=DISTRIBUTED_OPTIMIZER),
    }


def _sharded_rng() -> ShardedObject:
    state = {
        "torch": torch.get_rng_state(),
        "model_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", state, (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),))


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
