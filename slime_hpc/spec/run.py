"""RunSpec: the user's profile.yaml. Keys carry slime's flag names where slime has the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slime_hpc.spec.values import Memory, Name, Strict, TimeLimit

SbatchOptions = dict[str, str | int | bool]
"""Further sbatch options by long name (``exclude: n7``, ``exclusive: true``)."""


class Environment(Strict):
    """What makes Python with the engines available on a compute node."""

    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    """Shell lines, run in order after the modules. If there are any, ``python`` is the one they put on PATH."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Taken as they stand, in every process of the run. Those whose names look like secrets are never shown."""


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
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Tokens of one forward pass of a rank, samples packed without padding; a step is cut into as many as it needs."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron arguments under their own names."""


class Rollout(Component):
    gpus_per_engine: int = Field(default=1, ge=1)
    update_weight_buffer_size: int = Field(default=512 * 1024**2, ge=1)
    """Bytes of weights that an engine makes room for at a time while it is updated."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang server arguments under their own names."""
    router: dict[str, Any] = Field(default_factory=dict)
    """sglang-router's arguments under their own names."""


class ReasoningGym(Strict):
    """Tasks that the reasoning-gym package makes and verifies."""

    dataset: str
    """Its name there, such as ``basic_arithmetic``."""
    size: int = Field(ge=1)
    seed: int = 42
    """Task i is made from seed + i: seeds of two sets must lie further apart than their sizes."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own settings (``max_digits: 2``)."""


class Source(Strict):
    """Where prompts come from: exactly one of the two."""

    prompt_data: Path | None = None
    """JSONL or .parquet, one prompt a row; ``PATH@[start:end]`` takes a slice of the rows, as Python does."""
    reasoning_gym: ReasoningGym | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt_data is None) == (self.reasoning_gym is None):
            raise ValueError("needs either prompt_data (a file) or reasoning_gym (tasks made by that package)")
        return self


class Data(Source):
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    """A mapping that becomes ``sample.metadata``."""
    tool_key: str | None = None
    """A list of tools for the chat template, or its JSON text; null for none."""
    apply_chat_template: bool = False
    """Then a prompt may be text, taken as one user turn, or a list of messages."""
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


RM_TYPES = ("math", "reasoning_gym")
"""Verifiers that come with slime-hpc."""


class Reward(Strict):
    """Exactly one of a verifier and a function of the user's."""

    rm_type: str | None = None
    """One of RM_TYPES: ``math`` compares the last answer with the label, ``reasoning_gym`` asks the task's verifier."""
    custom_rm_path: str | None = None
    """``module.function``; modules beside the profile are found. ``function(args, sample) -> float``."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Hard limit for one sample; the worker process is killed then. A verifier's sample gets 0 and is counted."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.rm_type is None) == (self.custom_rm_path is None):
            raise ValueError(f"needs either rm_type ({' or '.join(RM_TYPES)}) or custom_rm_path (module.function)")
        return self


class EvalSet(Source):
    """Prompts that are never trained on by this set; templates and keys are those of ``data`` unless given."""

    name: Name
    input_key: str | None = None
    label_key: str | None = None
    held_out: bool = False
    """Leave out prompts that the training data has too. Their number is shown in any case."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    eval_temperature: float = Field(default=0.0, ge=0)
    """0 takes the likeliest token each time."""
    eval_max_response_len: int | None = Field(default=None, ge=1)
    """Left out: the training's."""

    def as_data(self, training: Data) -> Data:
        """This set, read the way the training data is."""
        return training.model_copy(
            update={
                "prompt_data": self.prompt_data,
                "reasoning_gym": self.reasoning_gym,
                "input_key": self.input_key or training.input_key,
                "label_key": self.label_key or training.label_key,
            }
        )

    def as_sampling(self, training: Sampling) -> Sampling:
        """How this set is answered."""
        return training.model_copy(
            update={
                "n_samples_per_prompt": self.n_samples_per_eval_prompt,
                "rollout_temperature": self.eval_temperature,
                "rollout_max_response_len": self.eval_max_response_len or training.rollout_max_response_len,
            }
        )


class Eval(Strict):
    """Answering prompts without training on them: before the first round, after the last, and in between."""

    interval: int | None = Field(default=None, ge=1)
    """Rounds between evaluations. Left out: only before the first round and after the last."""
    sets: tuple[EvalSet, ...] = ()


class Algorithm(Strict):
    advantage_estimator: Literal["grpo"] = "grpo"
    eps_clip: float = Field(default=0.2, ge=0)
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Left out: same as eps_clip."""
    disable_grpo_std_normalization: bool = False
    lr: float = Field(default=1e-6, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """Rounds after which the rate is ``min_lr``. Left out: ``num_rollout``."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Rounds in which the rate rises from 0, the first round's, to ``lr``."""


class Checkpoint(Strict):
    interval: int | None = Field(default=None, ge=1)
    """Rounds between checkpoints; the last round is always saved."""
    keep: int = Field(default=3, ge=1)


class RunSpec(Strict):
    """A whole run, resolved: paths absolute, defaults filled in."""

    name: Name
    cluster: str
    """A name in cluster_profiles, or a path."""
    account: str | None = None
    qos: str | None = None
    run_dir: Path
    time_limit_s: TimeLimit = Field(alias="time_limit")
    layout: Literal["het"] = "het"
    num_rollout: int = Field(ge=1)
    """Rounds to train."""
    seed: int = Field(default=1234, ge=0, lt=1 << 31)
    """Engine K samples with seed + K."""
    environment: Environment = Environment()
    model: Model
    trainer: Trainer
    rollout: Rollout
    data: Data
    sampling: Sampling
    reward: Reward
    algorithm: Algorithm = Algorithm()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
