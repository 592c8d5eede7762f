"""RunSpec: the user's profile.yaml. Keys carry slime's flag names where slime has the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slime_hpc.spec.values import Memory, Strict, TimeLimit

SbatchOptions = dict[str, str | int | bool]
"""Further sbatch options by long name (``exclude: n7``, ``exclusive: true``)."""


class Environment(Strict):
    """What makes Python with the engines available on a compute node."""

    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """Shell lines, run in order after the modules. If there are any, ``python`` is the one they put on PATH."""
    variables: dict[str, str] = Field(default_factory=dict)


class Model(Strict):
    hf_checkpoint: Path
    """Directory with config.json, safetensors and tokenizer."""


class Component(Strict):
    """One part of the heterogeneous job: where it runs and on how much."""

    partition: str
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    """Written as is; then ``gpus_per_node`` only counts processes and asks Slurm for nothing."""
    time_limit_s: TimeLimit | None = Field(default=None, alias="time_limit")
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)
    """Left out: the partition's own number."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of a node's one task. Left out: all that the cluster profile says a node has."""
    mem_mb: Memory | None = Field(default=None, alias="mem")
    """Memory per node."""
    sbatch: SbatchOptions = Field(default_factory=dict)


class Trainer(Component):
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron arguments under their own names."""


class Rollout(Component):
    gpus_per_engine: int = Field(default=1, ge=1)
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang server arguments under their own names."""


class Data(Strict):
    prompt_data: Path
    """JSONL, one prompt a line."""
    input_key: str = "input"
    label_key: str | None = None
    apply_chat_template: bool = False
    rollout_shuffle: bool = True
    rollout_seed: int = 42


class Sampling(Strict):
    rollout_batch_size: int = Field(ge=1)
    """Prompts a round."""
    n_samples_per_prompt: int = Field(default=1, ge=1)
    rollout_max_response_len: int = Field(ge=1)
    rollout_temperature: float = Field(default=1.0, gt=0)
    ignore_eos: bool = False
    """Generate to the full length whatever the model says."""


class Reward(Strict):
    custom_rm_path: str
    """``module.function``; modules beside the profile are found. ``function(args, sample) -> float``."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Hard limit for one sample; the worker process is killed then."""


class Algorithm(Strict):
    advantage_estimator: Literal["grpo"] = "grpo"
    eps_clip: float = Field(default=0.2, ge=0)
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Left out: same as eps_clip."""
    disable_grpo_std_normalization: bool = False
    lr: float = Field(default=1e-6, gt=0)


class Checkpoint(Strict):
    interval: int | None = Field(default=None, ge=1)
    """Rounds between checkpoints; the last round is always saved."""
    keep: int = Field(default=3, ge=1)


class RunSpec(Strict):
    """A whole run, resolved: paths absolute, defaults filled in."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    cluster: str
    """A name in cluster_profiles, or a path."""
    account: str | None = None
    qos: str | None = None
    run_dir: Path
    time_limit_s: TimeLimit = Field(alias="time_limit")
    layout: Literal["het"] = "het"
    num_rollout: int = Field(ge=1)
    """Rounds to train."""
    seed: int = 1234
    environment: Environment = Environment()
    model: Model
    trainer: Trainer
    rollout: Rollout
    data: Data
    sampling: Sampling
    reward: Reward
    algorithm: Algorithm = Algorithm()
    checkpoint: Checkpoint = Checkpoint()
