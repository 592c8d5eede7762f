"""Weights under Hugging Face names ↔ the Megatron parameters of one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime_hpc.errors import UserError
from slime_hpc.types import TensorMeta

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

DERIVED = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry although the config says it all."""


@dataclass(frozen=True)
class Layout:
    """Which HF tensors make up one Megatron parameter, and how.

    Each HF tensor is cut along ``split_dim`` over the tensor-parallel ranks (None: every rank has it whole).
    On a rank the cuts lie interleaved along dim 0, ``groups`` times one piece of each, whose lengths are in the
    proportions of ``shares``: QKV has one group per key-value head, holding its queries, key and value.
    """

    hf_names: tuple[str, ...]
    split_dim: int | None = None
    groups: int = 1
    shares: tuple[int, ...] = (1,)

    def join(self, tensors: list[Tensor], rank: int, size: int) -> Tensor:
        """Whole HF tensors → this rank's parameter."""
        parts = tensors if self.split_dim is None else [t.chunk(size, self.split_dim)[rank] for t in tensors]
        return torch.cat([p.reshape(self.groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)

    def separate(self, parameter: Tensor) -> list[Tensor]:
        """This rank's parameter → its cut of each HF tensor."""
        grouped = parameter.reshape(self.groups, -1, *parameter.shape[1:])
        unit = grouped.shape[1] // sum(self.shares)
        pieces = torch.split(grouped, [share * unit for share in self.shares], dim=1)
        return [piece.flatten(0, 1) for piece in pieces]

    def whole_shape(self, cut: Tensor, size: int) -> tuple[int, ...]:
        return tuple(n * size if dim == self.split_dim else n for dim, n in enumerate(cut.shape))


def model_layouts(config: TransformerConfig, tied: bool) -> dict[str, Layout]:
    """Layout of every parameter of a dense Llama-like model, by Megatron's name, in order of the forward pass."""
    layouts = {"embedding.word_embeddings.weight": Layout(("model.embed_tokens.weight",), split_dim=0)}
    for layer in range(config.num_layers):
        layouts |= {f"decoder.layers.{layer}.{name}": layout for name, layout in _layer_layouts(config, layer).items()}
    layouts["decoder.final_layernorm.weight"] = Layout(("model.norm.weight",))
    if not tied:
        layouts["output_layer.weight"] = Layout(("lm_head.weight",), split_dim=0)
    return layouts


def _layer_layouts(config: TransformerConfig, layer: int) -> dict[str, Layout]:
    def hf(*names: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in names)

    def qkv(suffix: str) -> Layout:
        names = hf(*(f"self_attn.{x}_proj.{suffix}" for x in "qkv"))
        groups = config.num_query_groups // config.tensor_model_parallel_size
        return Layout(names, 0, groups, (config.num_attention_heads // config.num_query_groups, 1, 1))

    layouts = {
        "input_layernorm.weight": Layout(hf("input_layernorm.weight")),
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": Layout(hf("self_attn.o_proj.weight"), split_dim=1),
        "pre_mlp_layernorm.weight": Layout(hf("post_attention_layernorm.weight")),
        "mlp.linear_fc1.weight": Layout(hf("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0, shares=(1, 1)),
        "mlp.linear_fc2.weight": Layout(hf("mlp.down_proj.weight"), split_dim=1),
    }
    if config.add_qkv_bias:
        layouts["self_attention.linear_qkv.bias"] = qkv("bias")
    if config.qk_layernorm:
        layouts["self_attention.q_layernorm.weight"] = Layout(hf("self_attn.q_norm.weight"))
        layouts["self_attention.k_layernorm.weight"] = Layout(hf("self_attn.k_norm.weight"))
    return layouts


class HfWeights:
    """The safetensors of a directory, read one tensor at a time."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self.directory = directory
        files: list[Any] = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def require_exactly(self, names: set[str], tied: bool) -> None:
        """UserError unless the files hold these tensors, and no other that would be left out."""
        missing = sorted(names - self._file_of.keys())
        if missing:
            raise UserError(f"{self.directory} lacks {_some(missing)}, which its config.json asks for; copy it again")
        known = names | ({"lm_head.weight"} if tied else set())
        extra = sorted(n for n in self._file_of.keys() - known if not n.endswith(DERIVED))
        if extra:
            raise UserError(
                f"{self.directory} holds {_some(extra)}, which a model of its config.json has no place for;"
                " choose another model, or remove files that do not belong to it"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_weights(model: GPTModel, layouts: Mapping[str, Layout], weights: HfWeights, rank: int, size: int) -> None:
    """Fill this rank's parameters. UserError if a tensor is missing, left over or of another shape."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == layouts.keys(), parameters.keys() ^ layouts.keys()
    tied: bool = model.share_embeddings_and_output_weights
    weights.require_exactly({name for layout in layouts.values() for name in layout.hf_names}, tied)
    for name, layout in layouts.items():
        tensors = [weights.read(hf_name) for hf_name in layout.hf_names]
        _require_shapes(weights, layout, tensors, parameters[name], size)
        with torch.no_grad():
            parameters[name].copy_(layout.join(tensors, rank, size))


def _require_shapes(weights: HfWeights, layout: Layout, tensors: list[Tensor], parameter: Tensor, size: int) -> None:
    for hf_name, tensor, cut in zip(layout.hf_names, tensors, layout.separate(parameter), strict=True):
        wanted = layout.whole_shape(cut, size)
        if tuple(tensor.shape) != wanted:
            raise UserError(
                f"{weights.directory}: {hf_name} has shape {tuple(tensor.shape)}, but config.json asks for {wanted};"
                " copy both from the same model"
            )


def weight_metas(model: GPTModel, layouts: Mapping[str, Layout], size: int) -> list[TensorMeta]:
    """What ``gather_weights`` yields, without the weights. Not collective."""
    parameters = dict(model.named_parameters())
    return [
        TensorMeta(hf_name, str(cut.dtype).removeprefix("torch."), layout.whole_shape(cut, size))
        for name, layout in layouts.items()
        for hf_name, cut in zip(layout.hf_names, layout.separate(parameters[name]), strict=True)
    ]


def gather_weights(
    model: GPTModel, layouts: Mapping[str, Layout], group: torch.distributed.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """HF name and whole tensor, one after the other, on every rank of the tensor-parallel ``group``. Collective."""
    parameters = dict(model.named_parameters())
    for name, layout in layouts.items():
        for hf_name, cut in zip(layout.hf_names, layout.separate(parameters[name].detach()), strict=True):
            yield hf_name, cut if layout.split_dim is None else _gather(cut, layout.split_dim, group)


def _gather(cut: Tensor, dim: int, group: torch.distributed.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return cut  # not a copy of all the weights
    cuts = [torch.empty_like(cut, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(cuts, cut.contiguous(), group=group)
    return torch.cat(cuts, dim)
