"""What becomes of each Megatron argument: applied to a config's field, held against the profile, or refused.

Names are fields of megatron-core's config classes (its snapshot) and flags of Megatron-LM's command line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from slime_hpc.errors import UserError
from slime_hpc.spec.passthrough.arguments import Argument, Interval, load_snapshot
from slime_hpc.spec.passthrough.megatron_lm import ARGUMENTS, FLAGS, REFUSED
from slime_hpc.spec.run import RunSpec

Config = Literal["transformer", "optimizer", "ddp"]
HfConfig = Mapping[str, Any]
"""The model's config.json as it stands there, without its class's defaults."""

APPLIED: dict[str, Config] = {
    "tensor_model_parallel_size": "transformer",
    "sequence_parallel": "transformer",
    "recompute_granularity": "transformer",
    "recompute_method": "transformer",
    "recompute_num_layers": "transformer",
    "recompute_modules": "transformer",
    "attention_softmax_in_fp32": "transformer",
    "apply_query_key_layer_scaling": "transformer",
    "deterministic_mode": "transformer",
    "weight_decay": "optimizer",
    "clip_grad": "optimizer",
    "adam_beta1": "optimizer",
    "adam_beta2": "optimizer",
    "adam_eps": "optimizer",
    "decoupled_weight_decay": "optimizer",
    "apply_wd_to_qk_layernorm": "optimizer",
    "use_distributed_optimizer": "optimizer",
    "grad_reduce_in_fp32": "ddp",
    "check_for_nan_in_grad": "ddp",
}
"""Field → whose it is: TransformerConfig, OptimizerConfig or DistributedDataParallelConfig."""

INTERVALS = {
    "tensor_model_parallel_size": Interval(1),
    "recompute_num_layers": Interval(1),
    "weight_decay": Interval(0),
    "clip_grad": Interval(0),
    "adam_beta1": Interval(0, 1),
    "adam_beta2": Interval(0, 1),
    "adam_eps": Interval(0, low_open=True),
}

RECOMPUTED = ("core_attn", "mlp")
"""Modules of a dense layer whose activations can be computed again; ``layernorm`` needs Transformer Engine."""


@dataclass(frozen=True)
class Decided:
    """The matter is decided elsewhere: a value that agrees is accepted, any other refused."""

    by: str
    """What decides, as a message ends: ``algorithm.lr decides``."""
    value: Callable[[RunSpec, HfConfig], Any]
    """KeyError where config.json does not say."""


def _profile(key: str) -> Decided:
    def look_up(spec: RunSpec, model: HfConfig) -> Any:
        return functools.reduce(getattr, key.split("."), spec)

    return Decided(f"{key} decides", look_up)


def _model(look_up: Callable[[HfConfig], Any]) -> Decided:
    return Decided("config.json of model.hf_checkpoint decides", lambda spec, model: look_up(model))


def _always(value: Any, reason: str) -> Decided:
    return Decided(reason, lambda spec, model: value)


_DROPOUT = "the engine samples without dropout, so the trainer trains without"
_ARCHITECTURE = "the supported models are built so"
_FUSED = "fused kernels need apex or Transformer Engine"
_LOCAL = "layers are Megatron-core's own, without Transformer Engine"
_DENSE = "mixture-of-experts models are not built yet"
_PARALLEL = "only tensor and data parallelism are built"

DECIDED: dict[str, Decided] = {
    "lr": _profile("algorithm.lr"),
    "min_lr": _profile("algorithm.min_lr"),
    "lr_decay_style": _profile("algorithm.lr_decay_style"),
    "lr_warmup_iters": _profile("algorithm.lr_warmup_iters"),
    "lr_decay_iters": Decided(
        "algorithm.lr_decay_iters, else num_rollout, decides",
        lambda spec, model: spec.algorithm.lr_decay_iters or spec.num_rollout,
    ),
    "seed": _profile("seed"),
    "save": Decided("run_dir decides", lambda spec, model: str(spec.run_dir)),
    "save_interval": _profile("checkpoint.interval"),
    "eval_interval": _profile("eval.interval"),
    "train_iters": _profile("num_rollout"),
    "global_batch_size": Decided(
        "sampling.rollout_batch_size × sampling.n_samples_per_prompt decides",
        lambda spec, model: spec.sampling.rollout_batch_size * spec.sampling.n_samples_per_prompt,
    ),
    "num_layers": _model(lambda m: m["num_hidden_layers"]),
    "hidden_size": _model(lambda m: m["hidden_size"]),
    "ffn_hidden_size": _model(lambda m: m["intermediate_size"]),
    "num_attention_heads": _model(lambda m: m["num_attention_heads"]),
    "num_query_groups": _model(lambda m: m["num_key_value_heads"]),
    "group_query_attention": _model(lambda m: m["num_key_value_heads"] != m["num_attention_heads"]),
    "kv_channels": _model(lambda m: m.get("head_dim") or m["hidden_size"] // m["num_attention_heads"]),
    "layernorm_epsilon": _model(lambda m: m["rms_norm_eps"]),
    "rotary_base": _model(lambda m: {**m, **(m.get("rope_parameters") or {})}["rope_theta"]),
    "untie_embeddings_and_output_weights": _model(lambda m: not m["tie_word_embeddings"]),
    "max_position_embeddings": _model(lambda m: m["max_position_embeddings"]),
    "vocab_size": _model(lambda m: m["vocab_size"]),
    "add_qkv_bias": _model(lambda m: m["model_type"] == "qwen2"),
    "qk_layernorm": _model(lambda m: m["model_type"] == "qwen3"),
    "hidden_dropout": _always(0.0, _DROPOUT),
    "attention_dropout": _always(0.0, _DROPOUT),
    "normalization": _always("RMSNorm", _ARCHITECTURE),
    "gated_linear_unit": _always(True, _ARCHITECTURE),
    "swiglu": _always(True, _ARCHITECTURE),
    "add_bias_linear": _always(False, _ARCHITECTURE),
    "position_embedding_type": _always("rope", _ARCHITECTURE),
    "use_rotary_position_embeddings": _always(True, _ARCHITECTURE),
    "rotary_percent": _always(1.0, _ARCHITECTURE),
    "rotary_interleaved": _always(False, _ARCHITECTURE),
    "multi_latent_attention": _always(False, _ARCHITECTURE),
    "masked_softmax_fusion": _always(False, _FUSED),
    "bias_activation_fusion": _always(False, _FUSED),
    "bias_dropout_fusion": _always(False, _FUSED),
    "gradient_accumulation_fusion": _always(False, _FUSED),
    "persist_layer_norm": _always(False, _FUSED),
    "apply_rope_fusion": _always(False, _FUSED),
    "transformer_impl": _always("local", _LOCAL),
    "attention_backend": _always("local", _LOCAL),
    "use_mcore_models": _always(True, _LOCAL),
    "pipeline_model_parallel_size": _always(1, _PARALLEL),
    "context_parallel_size": _always(1, _PARALLEL),
    "expert_model_parallel_size": _always(1, _DENSE),
    "expert_tensor_parallel_size": _always(1, _DENSE),
    "overlap_grad_reduce": _always(False, "gradients are reduced after the last micro-batch"),
    "overlap_param_gather": _always(False, "parameters are gathered at the end of a step"),
    "calculate_per_token_loss": _always(False, "the loss is a mean over samples of means over their tokens"),
    "optimizer": _always("adam", "Adam is the optimizer"),
    "ckpt_format": _always("torch_dist", "checkpoints have this format"),
    "finetune": _always(True, "a run starts from the weights in model.hf_checkpoint"),
}
"""Name → who decides."""


@dataclass(frozen=True)
class MegatronSettings:
    """What a profile adds to the arguments of megatron-core's three config classes."""

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)

    @property
    def tensor_parallel(self) -> int:
        size: int = self.transformer.get("tensor_model_parallel_size", 1)
        return size


def megatron_settings(megatron: Mapping[str, Any]) -> MegatronSettings:
    """The applied ones of a checked profile's ``trainer.megatron``. UserError for one that cannot be."""
    settings = MegatronSettings()
    for key, value in megatron.items():
        if config := APPLIED.get(key):
            getattr(settings, config)[key] = value
        elif key not in DECIDED:
            raise UserError(f"trainer.megatron.{key}: cannot be applied; remove it")
    return settings


@functools.cache
def megatron_arguments() -> dict[str, Argument]:
    """Every argument known, megatron-core's fields under all their flags and Megatron-LM's others."""
    fields = load_snapshot("megatron-core").named()
    core = {name: _with_flags(argument) for name, argument in fields.items()}
    return {**{a.name: a for a in ARGUMENTS}, **core}


def _with_flags(argument: Argument) -> Argument:
    on, off = FLAGS.get(argument.name, ((), ()))
    return argument.model_copy(
        update={
            "flags": tuple(dict.fromkeys((*argument.flags, *on))),
            "off_flags": tuple(dict.fromkeys((*argument.off_flags, *off))),
        }
    )


def megatron_refusal(name: str) -> str | None:
    """Why no value of an argument is accepted, or None if one may be."""
    if name in APPLIED or name in DECIDED:
        return None
    return next((reason for pattern, reason in REFUSED.items() if fnmatchcase(name, pattern)), None)


def megatron_conflicts(megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and reason where applied arguments do not go together, as megatron-core would say inside the job."""
    if megatron.get("sequence_parallel") and megatron.get("tensor_model_parallel_size", 1) == 1:
        yield "sequence_parallel", "needs tensor_model_parallel_size above 1; set that, or remove this"
    granularity = megatron.get("recompute_granularity")
    details = {"recompute_method", "recompute_num_layers"}
    for key in sorted(details & megatron.keys()) if granularity != "full" else ():
        yield key, "goes with recompute_granularity: full only; set that, or remove this"
    if "recompute_modules" in megatron and granularity != "selective":
        yield "recompute_modules", "goes with recompute_granularity: selective only; set that, or remove this"
    for missing in sorted(details - megatron.keys()) if granularity == "full" else ():
        yield "recompute_granularity", f"full needs {missing} as well (uniform and 1 recompute each layer by itself)"
    modules = megatron.get("recompute_modules") or ()
    for module in modules if isinstance(modules, list) else ():
        if module not in RECOMPUTED:
            yield "recompute_modules", f"{module!r} is not one of {', '.join(RECOMPUTED)}"
