"""What the trainer's transformer has in place of megatron-core's own local layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron-core's local layers, with the attention and the norms of this module."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's unfused attention, which refuses packed sequences: here each of them is attended by itself.

    A mask over the whole row would give the same, but costs memory and time by the square of the row's length.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[tokens, heads, head dim] of packed sequences → [tokens, heads × head dim]."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = super(PackedAttention, self).forward(q, k, v, attention_mask, *args, **kwargs)
            return out

        if packed_seq_params is None:
            return attend(query, key, value)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        cuts = zip(*(torch.split(t.unsqueeze(1), lengths) for t in (query, key, value)), strict=True)
        return torch.cat([attend(q, k, v) for q, k, v in cuts]).squeeze(1)


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked as megatron-core's wrapper, which refuses sequence parallelism, does not mark it.

    There each rank normalizes its part of the tokens, so the weight's gradients are to be summed over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
