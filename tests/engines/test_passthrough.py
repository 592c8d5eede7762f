"""The torch-free tables of keys against the installed Megatron-core and SGLang."""

from __future__ import annotations

import dataclasses

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from sglang.srt.server_args import ServerArgs

from slime_hpc.spec.passthrough import SGLANG_OWNED, MegatronArgs, SglangArgs


def test_megatron_keys_are_config_fields() -> None:
    optimizer = {field.name for field in dataclasses.fields(OptimizerConfig)}
    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    assert MegatronArgs.model_fields.keys() - optimizer == {"tensor_model_parallel_size"}
    assert "tensor_model_parallel_size" in parallel


def test_sglang_keys_are_server_args() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields  # type: ignore[attr-defined]

    known = {field.name for field in record_fields(ServerArgs)}
    assert (SglangArgs.model_fields.keys() | SGLANG_OWNED.keys()) - known == set()
