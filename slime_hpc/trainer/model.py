"""A Megatron-core GPTModel from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_hpc.errors import UserError
from slime_hpc.spec.passthrough import MegatronSettings

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

HfConfig = Any
"""A transformers config: its attributes differ from model to model."""

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Model types whose logits a test compares with transformers'."""


def read_hf_config(directory: Path) -> HfConfig:
    """The config with its model's defaults filled in. UserError for a model that cannot be trained here."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    problems = list(_unsupported(config))
    if problems:
        raise UserError(f"{directory / 'config.json'}: {'; '.join(problems)}")
    return config


def _unsupported(config: HfConfig) -> Iterator[str]:
    if config.model_type not in SUPPORTED:
        yield f"model_type {config.model_type!r} is not one of {', '.join(SUPPORTED)}; choose such a model"
        return
    rope_type = config.rope_parameters["rope_type"]
    if rope_type != "default":
        yield f"rope_type {rope_type!r} is not supported, only 'default'; choose a model without rope scaling"
    for name, wanted in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        value = getattr(config, name, wanted)
        if value != wanted:
            yield f"{name} {value!r} is not supported, only {wanted!r}; choose another model"
    if getattr(config, "use_sliding_window", False):
        yield "use_sliding_window is not supported; choose a model without it"


def require_divisible(config: HfConfig, tensor_parallel: int) -> None:
    """UserError where tensor parallelism cuts through an attention group, a vocabulary entry or an MLP row."""
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size"):
        value = getattr(config, name)
        if value % tensor_parallel:
            raise UserError(
                f"trainer.megatron.tensor_model_parallel_size {tensor_parallel} does not divide the model's"
                f" {name} ({value}); set it to a divisor"
            )


def megatron_config(config: HfConfig, dtype: torch.dtype, settings: MegatronSettings) -> TransformerConfig:
    """Megatron's description of the same model, with what the profile adds."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        # Although weights are loaded: it also marks those split over ranks, which the gradient norm must know.
        perform_initialization=True,
        # Fused kernels, which only CUDA builds of apex or Transformer Engine have.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **settings.transformer,
    )


def build_model(config: HfConfig, dtype: torch.dtype, settings: MegatronSettings) -> GPTModel:
    """This rank's part of the model, its weights still to be loaded. Needs Megatron's parallel state."""
    from megatron.core.models.gpt import GPTModel

    from slime_hpc.trainer.layers import block_spec

    require_divisible(config, settings.tensor_parallel)
    megatron = megatron_config(config, dtype, settings)
    return GPTModel(
        config=megatron,
        transformer_layer_spec=block_spec(megatron),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        parallel_output=True,
    )
