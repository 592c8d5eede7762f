"""What an engine is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_hpc.errors import UserError
from slime_hpc.plan import JobPlan
from slime_hpc.rollout.client import Completion, EngineError, EngineKeys
from slime_hpc.rollout.engine import engine_args, engine_env, prompt_room
from slime_hpc.rollout.generate import sampling_params
from slime_hpc.spec.run import Sampling


def plan(sglang: dict[str, Any], gpus_per_node: int = 4, gpus_per_engine: int = 2) -> JobPlan:
    def component(index: int, role: str) -> dict[str, Any]:
        size = {"nodes": 2, "gpus_per_node": gpus_per_node, "cpus_per_task": 4}
        return {"index": index, "role": role, "partition": role, "time_limit_s": 600, "options": {}, **size}

    spec = {
        "name": "tiny",
        "cluster": "devcluster",
        "run_dir": "/runs/r",
        "time_limit": 10,
        "num_rollout": 1,
        "seed": 100,
        "model": {"hf_checkpoint": "/models/tiny"},
        "trainer": {"partition": "train"},
        "rollout": {"partition": "rollout", "gpus_per_engine": gpus_per_engine, "sglang": sglang},
        "data": {"prompt_data": "/data/p.jsonl"},
        "sampling": {"rollout_batch_size": 1, "rollout_max_response_len": 8},
        "reward": {"custom_rm_path": "m.f"},
    }
    return JobPlan.model_validate(
        {
            "tool_version": "0",
            "token": "t",
            "attempt": 1,
            "run_dir": "/runs/r",
            "profile_dir": "/p",
            "python": "python",
            "engine_python": "python",
            "setup": [],
            "components": [component(0, "trainer"), component(1, "rollout")],
            "spec": spec,
            "cluster": {"name": "devcluster", "device": "cpu"},
        }
    )


def test_ours_the_devices_and_the_profiles_arguments_meet() -> None:
    args = engine_args(plan({"mem_fraction_static": 0.5, "context_length": 128}), 3, host="10.0.0.2", port=4000)
    assert args["mem_fraction_static"] == 0.5  # the device says 0.3
    assert args["context_length"] == 128
    assert (args["device"], args["dtype"]) == ("cpu", "float32")
    assert (args["host"], args["port"], args["model_path"]) == ("10.0.0.2", 4000, "/models/tiny")
    assert (args["tp_size"], args["random_seed"]) == (2, 103)


def test_engines_of_one_node_get_their_own_gpus() -> None:
    starts = [engine_args(plan({}), index, host="h", port=1)["base_gpu_id"] for index in range(4)]
    assert starts == [0, 2, 0, 2]


@pytest.mark.parametrize("key", ["port", "random_seed", "api_key", "grpc_port", "tokenizer_worker_num"])
def test_arguments_that_are_ours_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"rollout.sglang: {key} cannot be set"):
        engine_args(plan({key: 1}), 0, host="h", port=1)


def test_the_devices_python_path_goes_in_front() -> None:
    inherited = {"PYTHONPATH": "/a", "HOME": "/h"}
    assert engine_env(inherited, {"PYTHONPATH": "/shim", "X": "1"}) == {
        "PYTHONPATH": "/shim:/a",
        "HOME": "/h",
        "X": "1",
    }
    assert engine_env({}, {"PYTHONPATH": "/shim"}) == {"PYTHONPATH": "/shim"}
    assert engine_env(inherited, {}) == inherited


def test_keys_are_in_no_repr(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"api_key": "secret-1", "admin_api_key": "secret-2"}')
    keys = EngineKeys.load(tmp_path / "keys.json")
    assert keys.api_key == "secret-1"
    assert "secret" not in repr(keys)


def test_a_completion_is_parsed() -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 9, None]],
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "a1.v2",
    }
    assert Completion.parse({"text": "xy", "meta_info": meta}) == Completion(
        "xy", (7, 9), (-0.5, -1.5), "length", "a1.v2"
    )


def test_a_completion_aborted_in_the_queue_is_empty() -> None:
    body = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "a1.v2"}}
    assert Completion.parse(body) == Completion("", (), (), "abort", "a1.v2")


def test_engine_errors_quote_the_engine() -> None:
    error = EngineError("http://n2:4000", "/generate", "x" * 2000, status=400)
    assert str(error).startswith("engine http://n2:4000 answered 400 to /generate: xxx")
    assert len(str(error)) < 600
    assert "gave no answer" in str(EngineError("u", "/p", "waited 3 s"))


def test_sampling_params_are_sglangs_names() -> None:
    params = sampling_params(Sampling(rollout_batch_size=1, rollout_max_response_len=8, rollout_temperature=0.7))
    assert (params["temperature"], params["max_new_tokens"], params["ignore_eos"]) == (0.7, 8, False)


@pytest.mark.parametrize(
    ("sglang", "response", "room"),
    [
        ({}, 512, 16384 - 2 - 512),  # the CPU's own pool is smaller than the model's context
        ({"context_length": 4096}, 512, 4096 - 2 - 512),
        ({"max_total_tokens": 50_000}, 512, 40_960 - 2 - 512),
        ({"context_length": 4096}, 1, 4096 - 7),
    ],
)
def test_a_prompt_leaves_room_for_its_response_and_is_not_refused(
    sglang: dict[str, Any], response: int, room: int
) -> None:
    args = engine_args(plan(sglang), 0, host="h", port=1)
    assert prompt_room(args, 40_960, response) == room
