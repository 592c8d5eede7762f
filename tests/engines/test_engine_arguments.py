"""Every argument that is accepted reaches the real Megatron-core or SGLang, and changes what it should."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_pool as on_rank
from serving import make_plan
from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs

from slime_hpc.rollout import snapshot as sglang_snapshot
from slime_hpc.rollout.engine import engine_args
from slime_hpc.rollout.router_server import router_args
from slime_hpc.spec.passthrough import apply_flags, check_keys
from slime_hpc.spec.passthrough.arguments import Argument, load_snapshot
from slime_hpc.spec.passthrough.keys import ROUTER, SGLANG
from slime_hpc.spec.passthrough.megatron import APPLIED
from slime_hpc.spec.passthrough.router import router_refusal
from slime_hpc.spec.passthrough.sglang import cpu_refusal, sglang_refusal
from slime_hpc.spec.yaml_tree import Tree
from slime_hpc.trainer import snapshot as megatron_snapshot
from slime_hpc.types import TrainBatch

SETTINGS: dict[str, dict[str, Any]] = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    "recompute_granularity": {"recompute_granularity": "selective"},
    "recompute_method": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "recompute_modules": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "attention_softmax_in_fp32": {"attention_softmax_in_fp32": False},
    "apply_query_key_layer_scaling": {"apply_query_key_layer_scaling": True},
    "deterministic_mode": {"deterministic_mode": True},
    "weight_decay": {"weight_decay": 0.5},
    "clip_grad": {"clip_grad": 0.01},
    "adam_beta1": {"adam_beta1": 0.5},
    "adam_beta2": {"adam_beta2": 0.5},
    "adam_eps": {"adam_eps": 0.1},
    "decoupled_weight_decay": {"decoupled_weight_decay": False, "weight_decay": 0.5},
    "apply_wd_to_qk_layernorm": {"apply_wd_to_qk_layernorm": True, "weight_decay": 0.5},
    "use_distributed_optimizer": {"use_distributed_optimizer": True},
    "grad_reduce_in_fp32": {"grad_reduce_in_fp32": True},
    "check_for_nan_in_grad": {"check_for_nan_in_grad": True},
}
"""For each applied argument a value that is not the default, with what it needs beside it."""

SAME_STEP = {key for key, config in APPLIED.items() if config != "optimizer"} | {"use_distributed_optimizer"}
"""These save memory, split or check, and compute the same; the other ones of the optimizer change the step."""

BATCH = TrainBatch(
    tokens=[[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12], [9, 8, 7, 6]],
    response_lengths=[3, 2, 2],
    loss_masks=[[1, 1, 1], [1, 1], [1, 1]],
    rollout_log_probs=[[-1.0, -1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
    advantages=[1.0, -0.5, 0.25],
)


@pytest.fixture(scope="module")
def pool() -> Iterator[on_rank.Pool]:
    pool = on_rank.Pool(2)
    yield pool
    pool.close()


def configs_and_weights(
    pool: on_rank.Pool, directory: Path, model: Path, ranks: int = 1, **megatron: Any
) -> tuple[dict[str, dict[str, Any]], on_rank.Weights]:
    """The built configs' fields, and the weights after two steps, of a trainer with these arguments."""
    plan = on_rank.trainer_plan(directory, model, lr=1e-3, **megatron)
    address = pool.run(on_rank.create, plan, ranks, ranks=ranks)[0]
    pool.run(on_rank.setup, *address, ranks=ranks)
    try:
        for _ in range(2):
            pool.run(on_rank.train, BATCH, ranks=ranks)
        return pool.run(on_rank.configs, ranks=ranks)[0], pool.run(on_rank.weights, ranks=ranks)[0]
    finally:
        pool.run(on_rank.shutdown, ranks=ranks)


@pytest.fixture(scope="module")
def default(
    pool: on_rank.Pool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Any]], on_rank.Weights]:
    return configs_and_weights(pool, tmp_path_factory.mktemp("run"), tiny_model)


@pytest.mark.parametrize("key", APPLIED)
def test_an_applied_megatron_argument_changes_the_built_configuration(
    pool: on_rank.Pool, tiny_model: Path, tmp_path: Path, default: Any, key: str
) -> None:
    settings = SETTINGS[key]
    ranks = settings.get("tensor_model_parallel_size", 1)
    configs, weights = configs_and_weights(pool, tmp_path, tiny_model, ranks, **settings)
    assert configs[APPLIED[key]][key] == settings[key] != default[0][APPLIED[key]][key]
    largest = max(np.abs(weights[name] - expected).max() for name, expected in default[1].items())
    if key in SAME_STEP:
        assert largest < 1e-4
    else:
        assert largest > 1e-6


def test_a_gradient_that_is_nan_is_found(pool: on_rank.Pool, tiny_model: Path, tmp_path: Path) -> None:
    broken = dataclasses.replace(BATCH, advantages=[float("nan"), 1.0, 1.0])
    plan = on_rank.trainer_plan(tmp_path, tiny_model, check_for_nan_in_grad=True)
    address = pool.run(on_rank.create, plan, 1, ranks=1)[0]
    pool.run(on_rank.setup, *address, ranks=1)
    try:
        with pytest.raises(AssertionError, match="found NaN in local grad norm"):
            pool.run(on_rank.train, broken, ranks=1)
    finally:
        pool.run(on_rank.shutdown, ranks=1)


def test_the_snapshot_is_of_the_installed_megatron(pool: on_rank.Pool) -> None:
    taken = megatron_snapshot.take_snapshot()
    shipped = load_snapshot("megatron-core")
    assert (taken.version, taken.arguments) == (shipped.version, shipped.arguments)


def test_the_snapshots_are_of_the_installed_sglang_and_its_router() -> None:
    for taken in sglang_snapshot.take_snapshots():
        shipped = load_snapshot(taken.package)
        assert (taken.version, taken.arguments) == (shipped.version, shipped.arguments)


@pytest.mark.parametrize(
    "argument",
    [a for a in load_snapshot("sglang-router").arguments if router_refusal(a.name) is None],
    ids=lambda argument: argument.name,
)
def test_a_flag_reaches_the_router_as_its_own_parser_would_have_it(argument: Argument, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser)
    for flag in argument.flags:
        words = [flag, "1.5"] if flag == "--balance-rel-threshold" else words_for(argument, flag, parser)
        tree = Tree("profile.yaml")
        apply_flags(tree, [ROUTER.prefix + flag.removeprefix("--"), *words[1:]])
        assert check_keys(tree) == []
        plan = make_plan(tmp_path, tmp_path)
        rollout = plan.spec.rollout.model_copy(update={"router": tree.values["rollout"]["router"]})
        plan = plan.model_copy(update={"spec": plan.spec.model_copy(update={"rollout": rollout})})
        ours = RouterArgs(**json.loads(json.dumps(router_args(plan, 1, 2))))
        theirs = RouterArgs.from_cli_args(parser.parse_args(words))
        assert getattr(ours, argument.name) == getattr(theirs, argument.name)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's own."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


PASSED_ON = [
    argument
    for argument in load_snapshot("sglang").arguments
    if sglang_refusal(argument.name) is None and cpu_refusal(argument.name) is None
]


def words_for(argument: Argument, flag: str, parser: argparse.ArgumentParser) -> list[str]:
    """A command line that sets it to something, as SGLang's users write it."""
    action = parser._option_string_actions[flag]
    if action.nargs == 0:
        return [flag]
    if argument.choices:
        return [flag, str(argument.choices[-1])]
    if argument.element == "dict":
        return [flag, '[{"name": "a"}]']
    if argument.element:
        items = ["ab", "cd"] if argument.element == "str" else ["3", "5"]
        return [flag, *items] if action.nargs else [flag, json.dumps(items)]
    kind = next(kind for kind in argument.types if kind != "null")
    return [flag, {"int": "3", "float": "0.25", "str": "text", "dict": '{"a": 1}'}[kind]]


@pytest.mark.parametrize("argument", PASSED_ON, ids=lambda argument: argument.name)
def test_a_flag_reaches_sglang_as_its_own_parser_would_have_it(
    argument: Argument, parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    for flag in (*argument.flags, *argument.off_flags):
        words = words_for(argument, flag, parser)
        tree = Tree("profile.yaml")
        apply_flags(tree, [SGLANG.prefix + flag.removeprefix("--"), *words[1:]])
        assert check_keys(tree) == []
        plan = make_plan(tmp_path, tmp_path, **tree.values["rollout"]["sglang"])
        ours = ServerArgs(**json.loads(json.dumps(engine_args(plan, 0, host="127.0.0.1", port=1))))
        theirs = ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", *words]))
        assert getattr(ours, argument.name) == getattr(theirs, argument.name)
        assert ours.model_path == str(tmp_path)


def test_hundreds_of_sglang_arguments_are_passed_on() -> None:
    assert len(PASSED_ON) > 200
