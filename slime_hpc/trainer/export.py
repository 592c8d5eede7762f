"""A checkpoint as an HF model, by one process on a CPU, whatever number of ranks wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from slime_hpc.device import get_device
from slime_hpc.plan import JobPlan
from slime_hpc.spec.passthrough import megatron_settings
from slime_hpc.trainer.hf_weights import gather_weights, model_layouts
from slime_hpc.trainer.ranks import write_hf_model


def export_checkpoint(plan: JobPlan, checkpoint: Path, directory: Path, origin: Mapping[str, object]) -> None:
    """Write the weights in ``checkpoint`` to ``directory``, which they replace; bit for bit those of the ranks.

    Once in a process: it joins a process group of its own.
    """
    get_device("cpu").prepare_trainer()
    from megatron.core import dist_checkpointing, parallel_state

    from slime_hpc.trainer.model import build_model, read_hf_config

    _join_alone()
    source = plan.spec.model.hf_checkpoint
    config = read_hf_config(source)
    alone = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    settings = megatron_settings({**plan.spec.trainer.megatron, **alone})
    model = build_model(config, get_device(plan.cluster.device).torch_dtype(), settings)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict(prefix="")}, str(checkpoint))
    model.load_state_dict(loaded["model"])
    layouts = model_layouts(model.config, tied=config.tie_word_embeddings)
    group = parallel_state.get_tensor_model_parallel_group()
    write_hf_model(directory, source, dict(gather_weights(model, layouts, group)), origin)


def _join_alone() -> None:
    """Megatron builds and loads models only within a process group."""
    from megatron.core import parallel_state, tensor_parallel

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # of initial weights, all of which are replaced
