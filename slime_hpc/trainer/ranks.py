"""One rank of the trainer, as a plain class; the driver makes a Ray actor of it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import TCPStore

from slime_hpc.device import get_device
from slime_hpc.plan import JobPlan
from slime_hpc.records import fsync_dir, read_json, write_json
from slime_hpc.spec.passthrough import megatron_settings
from slime_hpc.spec.run import RunSpec
from slime_hpc.supervisor.address import interface_of, own_address
from slime_hpc.trainer.hf_weights import HfWeights, Layout, gather_weights, load_weights, model_layouts, weight_metas
from slime_hpc.types import LoadedState, ShardReport, TensorMeta, TrainBatch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

TIMEOUT = timedelta(minutes=10)
"""For the ranks to meet, and for any one collective."""

COPIED = re.compile(r"(?!\.|config\.json$|.*\.index\.json$).*\.(json|txt|model|jinja)")
"""Files that an exported model takes from the HF checkpoint: tokenizer, chat template, generation defaults."""

ORIGIN = "slime_hpc_export.json"
"""In an exported model: of which run and round it is."""


class TrainerRank:
    """Model, optimizer and process group of rank ``rank`` of ``world_size``.

    ``setup`` is called once, then any other method; those marked collective on all ranks alike. ``step`` counts
    the optimizer updates so far.
    """

    def __init__(self, plan: JobPlan, rank: int, world_size: int) -> None:
        self._spec = plan.spec
        self._device = get_device(plan.cluster.device)
        self._megatron = megatron_settings(plan.spec.trainer.megatron)
        self._tensor_parallel = self._megatron.tensor_parallel
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self._store: TCPStore | None = None
        self._model: GPTModel
        self._ddp: DistributedDataParallel
        self._optimizer: MegatronOptimizer
        self._scheduler: OptimizerParamScheduler
        self._layouts: dict[str, Layout]

    def rendezvous(self, host: str) -> tuple[str, int]:
        """Rank 0 opens the store the ranks meet at, on an address of its node that others reach.

        Returns address and port; it listens from now on, so that no other process can take the port.
        """
        listener = socket.create_server((host, 0))
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            self.world_size,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return host, port

    def setup(self, master_host: str, master_port: int) -> None:
        """Join the other ranks, build the model and load its HF weights. Collective."""
        self._device.prepare_trainer()
        self._join(master_host, master_port)
        self._build()

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step over the whole batch, which every rank is given. Collective."""
        from slime_hpc.trainer.step import train_step

        metrics = train_step(
            self._ddp,
            self._optimizer,
            batch,
            self._spec.algorithm,
            temperature=self._spec.sampling.rollout_temperature,
            max_tokens=self._spec.trainer.max_tokens_per_gpu,
        )
        self.step += 1
        self._scheduler.step(increment=1)
        return metrics

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF name and whole tensor, in the order of ``weight_metas``. Collective, as it is iterated."""
        from megatron.core import parallel_state

        return gather_weights(self._model, self._layouts, parallel_state.get_tensor_model_parallel_group())

    def weight_metas(self) -> list[TensorMeta]:
        return weight_metas(self._model, self._layouts, self._tensor_parallel)

    def save(self, directory: Path) -> list[ShardReport]:
        """Write this rank's part of a new checkpoint directory; reported files are on disk for good. Collective."""
        from slime_hpc.trainer.state import save_state

        return save_state(directory, self._model, self._optimizer, self.step)

    def load(self, directory: Path) -> LoadedState:
        """Go on exactly where ``save`` was called. Collective.

        Other numbers of ranks go on from the same numbers too, and then sum up in another order.
        ClusterError if files are missing or unreadable.
        """
        from slime_hpc.trainer.state import load_state

        loaded = load_state(directory, self._model, self._optimizer, self._spec.seed)
        self.step = loaded.step
        # The rates follow from the step and the profile of today, so they are no part of the checkpoint.
        self._scheduler = build_scheduler(self._optimizer, self._spec)
        self._scheduler.step(increment=self.step)
        return loaded

    def export_hf(self, directory: Path) -> None:
        """Write a model that transformers loads; replaces an older one. Collective; rank 0 writes.

        A kill leaves the new model, the old one (perhaps as a hidden sibling) or none, never a part.
        """
        kept = {name: tensor.cpu() for name, tensor in self.named_hf_tensors() if self.rank == 0}
        if self.rank == 0:
            write_hf_model(directory, self._spec.model.hf_checkpoint, kept)
        torch.distributed.barrier()

    def shutdown(self) -> None:
        """Leave the process groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        self._store = None

    def _join(self, master_host: str, master_port: int) -> None:
        from megatron.core import parallel_state

        from slime_hpc.trainer.state import seed_rng

        os.environ.update(self._device.network_env(interface_of(own_address(master_host))))
        if self._store is None:
            self._store = TCPStore(master_host, master_port, self.world_size, is_master=False, timeout=TIMEOUT)
        torch.distributed.init_process_group(
            self._device.backend, store=self._store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._tensor_parallel, distributed_timeout_minutes=TIMEOUT.seconds // 60
        )
        seed_rng(self._spec.seed)

    def _build(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from slime_hpc.trainer.model import build_model, read_hf_config

        checkpoint = self._spec.model.hf_checkpoint
        config = read_hf_config(checkpoint)
        self._model = build_model(config, self._device.torch_dtype(), self._megatron)
        self._layouts = model_layouts(self._model.config, tied=config.tie_word_embeddings)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        load_weights(self._model, self._layouts, HfWeights(checkpoint), tp_rank, self._tensor_parallel)
        distributed = self._megatron.optimizer.get("use_distributed_optimizer", False)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **self._megatron.ddp)
        self._ddp = DistributedDataParallel(self._model.config, ddp_config, self._model)
        self._optimizer = self._build_optimizer()
        self._scheduler = build_scheduler(self._optimizer, self._spec)

    def _build_optimizer(self) -> MegatronOptimizer:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        dtype = self._device.torch_dtype()
        given = self._megatron.optimizer
        config = OptimizerConfig(optimizer="adam", lr=self._spec.algorithm.lr, params_dtype=dtype, **given)
        return get_megatron_optimizer(config, [self._ddp])


def build_scheduler(optimizer: MegatronOptimizer, spec: RunSpec) -> OptimizerParamScheduler:
    """Megatron's, at step 0; it also keeps norms and biases from decaying."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    algorithm = spec.algorithm
    weight_decay = optimizer.config.weight_decay
    decay_iters = algorithm.lr_decay_iters or spec.num_rollout
    for group in optimizer.param_groups:
        group.update(max_lr=algorithm.lr, min_lr=algorithm.min_lr)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=algorithm.lr,
        min_lr=algorithm.min_lr,
        lr_warmup_steps=algorithm.lr_warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=algorithm.lr_decay_style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=decay_iters,
        wd_incr_style="constant",
    )


def write_hf_model(
    directory: Path, source: Path, tensors: dict[str, torch.Tensor], origin: Mapping[str, object] | None = None
) -> None:
    """``source`` with these weights, in ``directory``: tokenizer and config are its own, but for the dtype.

    ``origin`` says where they come from, in a file beside them.
    """
    from safetensors.torch import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for path in source.iterdir():
            if COPIED.fullmatch(path.name):
                shutil.copyfile(path, new / path.name)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config = {key: value for key, value in read_json(source / "config.json").items() if key != "torch_dtype"}
        write_json(new / "config.json", {**config, "dtype": dtype})
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "model.safetensors").chmod(0o644)  # safetensors makes it 0600; who may read is run_dir's to say
        if origin is not None:
            write_json(new / ORIGIN, origin)
        _sync_tree(new)
        _put_in_place(new, directory, Path(scratch) / "old")
        fsync_dir(directory.parent)


def _put_in_place(new: Path, directory: Path, old: Path) -> None:
    """Of two exports at once, each whole, the later stays."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # there is none yet
            os.replace(directory, old)
        try:
            os.replace(new, directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(old, ignore_errors=True)  # another came in between: once more
        else:
            return


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    fsync_dir(directory)
