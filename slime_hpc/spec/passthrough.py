"""Which Megatron, SGLang and sbatch keys a profile may carry, and why others are refused.

Nothing accepted is ignored: a key is applied (a field of the two models here), owned by another key of the
profile (the ``*_OWNED`` tables say which), or unsupported. Torch-free, so that a login node can tell.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_hpc.spec.values import Strict

SchedulePolicy = Literal[
    "lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key", "hrrn", "shortest-prefill-first"
]


class MegatronArgs(Strict):
    """Megatron arguments that are applied. Left out: megatron-core's own default.

    ``tensor_model_parallel_size`` is a field of ModelParallelConfig, the others are fields of OptimizerConfig.
    """

    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    weight_decay: float | None = Field(default=None, ge=0)
    clip_grad: float | None = Field(default=None, ge=0)
    """0 clips nothing."""
    adam_beta1: float | None = Field(default=None, ge=0, lt=1)
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    adam_eps: float | None = Field(default=None, gt=0)


class SglangArgs(Strict):
    """SGLang ServerArgs fields that are passed on as they are. Left out: SGLang's own default."""

    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    max_running_requests: int | None = Field(default=None, ge=1)
    context_length: int | None = Field(default=None, ge=1)
    chunked_prefill_size: int | None = Field(default=None, ge=-1)
    schedule_policy: SchedulePolicy | None = None
    schedule_conservativeness: float | None = Field(default=None, gt=0)
    stream_interval: int | None = Field(default=None, ge=1)
    watchdog_timeout: float | None = Field(default=None, gt=0)


_MODEL = "read from config.json of model.hf_checkpoint"
_BATCH = "follows from sampling.rollout_batch_size × sampling.n_samples_per_prompt; set those"
_DEVICE = "decided by the cluster profile's device"

MEGATRON_OWNED = {
    "lr": "set algorithm.lr instead",
    "min_lr": "the learning rate is constant in this version; set algorithm.lr",
    "lr_decay_style": "the learning rate is constant in this version; set algorithm.lr",
    "seed": "set seed instead",
    "save": "checkpoints go to run_dir; set that instead",
    "load": "a run starts from model.hf_checkpoint; set that instead",
    "save_interval": "set checkpoint.interval instead",
    "train_iters": "set num_rollout instead",
    "micro_batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "seq_length": "follows from the samples",
    "num_layers": _MODEL,
    "hidden_size": _MODEL,
    "ffn_hidden_size": _MODEL,
    "num_attention_heads": _MODEL,
    "num_query_groups": _MODEL,
    "kv_channels": _MODEL,
    "norm_epsilon": _MODEL,
    "rotary_base": _MODEL,
    "untie_embeddings_and_output_weights": _MODEL,
    "max_position_embeddings": _MODEL,
    "vocab_size": _MODEL,
    "bf16": _DEVICE,
    "fp16": _DEVICE,
    "distributed_backend": _DEVICE,
}
"""Megatron arguments that another key owns, and what to do instead."""

_SERVER = "slime-hpc starts the server and decides where it listens"
_LAYOUT = "follows from rollout.gpus_per_engine; set that instead"
_KEYS = "made fresh for each attempt, so that no key is ever written down"

SGLANG_OWNED = {
    "model_path": "set model.hf_checkpoint instead",
    "tokenizer_path": "set model.hf_checkpoint instead",
    "host": _SERVER,
    "port": _SERVER,
    "grpc_port": "its listener would not ask for the engine's keys",
    "tokenizer_worker_num": "further workers would not ask for the engine's keys",
    "served_model_name": "it is the run's name",
    "log_level": "`slime-hpc logs RUN engine-0` relies on it",
    "log_level_http": "one line a request would drown the log",
    "nccl_port": _SERVER,
    "dist_init_addr": _SERVER,
    "nnodes": _LAYOUT,
    "node_rank": _LAYOUT,
    "tp_size": _LAYOUT,
    "base_gpu_id": _LAYOUT,
    "api_key": _KEYS,
    "admin_api_key": _KEYS,
    "random_seed": "set seed instead",
    "dtype": _DEVICE,
    "device": _DEVICE,
    "skip_server_warmup": "slime-hpc checks the server's health itself",
    "enable_memory_saver": "only layout colocate needs it, which this version has not",
}
"""SGLang arguments that another key owns, and what to do instead."""

_OUTPUT = "Slurm's output goes to run_dir, where `slime-hpc logs` finds it"
_REQUEUE = "this version cannot resume a run, so its jobs are never requeued"
_SHAPE = "one task a node starts everything there; set nodes, gpus_per_node and cpus_per_task"

SBATCH_OWNED = {
    "partition": "set the component's partition",
    "account": "set the component's account, or the profile's",
    "qos": "set the component's qos, or the profile's",
    "constraint": "set the component's constraint",
    "gres": "set the component's gres or gpus_per_node",
    "gpus": _SHAPE,
    "gpus-per-node": _SHAPE,
    "gpus-per-task": _SHAPE,
    "gpus-per-socket": _SHAPE,
    "nodes": "set the component's nodes",
    "ntasks": _SHAPE,
    "ntasks-per-node": _SHAPE,
    "cpus-per-task": "set the component's cpus_per_task",
    "mem": "set the component's mem",
    "mem-per-cpu": "set the component's mem",
    "time": "set the component's time_limit, or the profile's",
    "job-name": "set name",
    "output": _OUTPUT,
    "error": _OUTPUT,
    "open-mode": _OUTPUT,
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    "comment": "it carries the token by which `slime-hpc status` finds the job",
    "signal": "the supervisor needs it",
    "array": "a run is one job",
    "wrap": "slime-hpc writes the script",
    "parsable": "it changes what sbatch prints, which slime-hpc reads",
    "wait": "`slime-hpc status` shows how the run stands",
}
"""sbatch options that another key owns, and what to do instead."""
