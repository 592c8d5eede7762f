"""Megatron and SGLang arguments: in the profile and as flags, accepted or refused with the reason."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.errors import UserError
from slime_hpc.plan import plan_job, plan_warnings
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.spec.passthrough import SBATCH_OWNED, megatron_settings, router, sglang
from slime_hpc.spec.passthrough.arguments import Snapshot, first_match, load_snapshot
from slime_hpc.spec.passthrough.flags import _known_flags
from slime_hpc.spec.passthrough.keys import ENGINES
from slime_hpc.spec.passthrough.megatron import APPLIED, DECIDED, megatron_arguments, megatron_refusal
from slime_hpc.spec.passthrough.megatron_lm import ARGUMENTS, FLAGS

Refused = Callable[..., str]

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


@pytest.fixture
def load(quickstart: Path) -> Callable[..., Profile]:
    (quickstart.parent / "model" / "config.json").write_text(json.dumps(QWEN3))

    def load(*flags: str, sets: tuple[str, ...] = ()) -> Profile:
        return load_profile(quickstart, sets=sets, flags=flags)

    return load


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--sglang-mem-fraction-static 0.8", "mem_fraction_static", 0.8),
        ("--sglang-mem-fraction-static=0.8", "mem_fraction_static", 0.8),
        ("--sglang-chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--sglang-disable-radix-cache", "disable_radix_cache", True),
        ("--sglang-disable-radix-cache=false", "disable_radix_cache", False),
        ("--sglang-disable-radix-cache --sglang-page-size 1", "disable_radix_cache", True),
        ("--sglang-mm-enable-dp-encoder", "mm_enable_dp_encoder", True),
        ("--sglang-no-mm-enable-dp-encoder", "mm_enable_dp_encoder", False),
        ("--sglang-gc-threshold 700 10 5", "gc_threshold", [700, 10, 5]),
        ("--sglang-gc-threshold=[700,10]", "gc_threshold", [700, 10]),
        ('--sglang-extra-metric-labels {"a":"b"}', "extra_metric_labels", {"a": "b"}),
        ("--sglang-crash-dump-folder 123", "crash_dump_folder", "123"),
        ("--sglang-schedule-policy lpm", "schedule_policy", "lpm"),
        ("--sglang-watchdog-timeout 60", "watchdog_timeout", 60),
        ("--sglang-page-size 1 --sglang-page-size 2", "page_size", 2),
    ],
)
def test_sglang_flags(load: Callable[..., Profile], flags: str, key: str, value: object) -> None:
    assert load(*flags.split()).spec.rollout.sglang[key] == value


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--weight-decay 0.1", "weight_decay", 0.1),
        ("--weight-decay 1", "weight_decay", 1),
        ("--apply-query-key-layer-scaling", "apply_query_key_layer_scaling", True),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "recompute_modules",
            ["core_attn", "mlp"],
        ),
        ("--recompute-granularity selective --recompute-modules mlp", "recompute_modules", ["mlp"]),
        ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_grad", False),
        ("--no-decoupled-weight-decay", "decoupled_weight_decay", False),
    ],
)
def test_megatron_flags(load: Callable[..., Profile], flags: str, key: str, value: object) -> None:
    assert load(*flags.split()).spec.trainer.megatron[key] == value


MODEL_ARGS = """
    --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
    --qk-layernorm --attention-dropout 0.0 --hidden-dropout 0 --attention-softmax-in-fp32 --optimizer adam
    --lr 5e-3 --lr-decay-style constant --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --no-rope-fusion --no-masked-softmax-fusion --seed 1234 --global-batch-size 32
"""


def test_flags_that_agree_with_profile_and_model_are_accepted(load: Callable[..., Profile]) -> None:
    profile = load(*MODEL_ARGS.split())
    assert megatron_settings(profile.spec.trainer.megatron).transformer == {"attention_softmax_in_fp32": True}
    assert megatron_settings(profile.spec.trainer.megatron).optimizer == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--lr 1",
            "--lr: trainer.megatron.lr: 1 disagrees: algorithm.lr decides (0.005); remove this key, or change that",
        ),
        (
            "--num-layers 35",
            "trainer.megatron.num_layers: 35 disagrees: config.json of model.hf_checkpoint decides (36)",
        ),
        ("--untie-embeddings-and-output-weights", "true disagrees: config.json of model.hf_checkpoint decides (false)"),
        ("--hidden-dropout 0.1", "0.1 disagrees: the engine samples without dropout"),
        ("--pipeline-model-parallel-size 2", "2 disagrees: only tensor and data parallelism are built (1)"),
        (
            "--global-batch-size 8",
            "8 disagrees: sampling.rollout_batch_size × sampling.n_samples_per_prompt decides (32)",
        ),
        ("--bias-swiglu-fusion", "trainer.megatron.bias_activation_fusion: true disagrees: fused kernels need"),
        ("--seed 1.5", "trainer.megatron.seed: 1.5 is not a whole number"),
        (
            "--num-experts 8",
            "trainer.megatron.num_experts: may not be set here: mixture-of-experts models are not built",
        ),
        ("--moe-router-topk 2", "trainer.megatron.moe_router_topk: may not be set here: mixture-of-experts"),
        ("--fp8-format hybrid", "trainer.megatron.fp8: may not be set here: needs Transformer Engine"),
        ("--bf16", "trainer.megatron.bf16: may not be set here: decided by the cluster profile's device"),
        ("--micro-batch-size 4", "micro-batches are cut by tokens; set trainer.max_tokens_per_gpu"),
        ("--load /x", "trainer.megatron.load: may not be set here: a run starts from model.hf_checkpoint"),
        ("--data-path a b", "trainer.megatron.data_path: may not be set here: prompts come from data"),
        ("--weight-decay heavy", 'trainer.megatron.weight_decay: "heavy" is not a number'),
        ("--weight-decay -1", "trainer.megatron.weight_decay: -1 is not at least 0"),
        ("--adam-beta1 1", "trainer.megatron.adam_beta1: 1 is not at least 0 and under 1"),
        ("--recompute-granularity some", 'recompute_granularity: "some" is not one of full, selective'),
        ("--recompute-granularity full", "recompute_granularity: full needs recompute_method as well"),
        ("--sequence-parallel", "sequence_parallel: needs tensor_model_parallel_size above 1"),
        ("--recompute-num-layers 1", "recompute_num_layers: goes with recompute_granularity: full only"),
        ("--recompute-granularity selective --recompute-modules moe", "'moe' is not one of core_attn, mlp"),
        ("--sglang-port 1", "--sglang-port: rollout.sglang.port: may not be set here: slime-hpc starts the server"),
        (
            "--sglang-tensor-parallel-size 2",
            "rollout.sglang.tp_size: may not be set here: follows from rollout.gpus_per",
        ),
        ("--sglang-dtype half", "rollout.sglang.dtype: may not be set here: decided by the cluster profile's device"),
        ("--sglang-quantization fp8", "rollout.sglang.quantization: may not be set here: weights arrive in"),
        ("--sglang-attention-backend fa3", "rollout.sglang.attention_backend: may not be set here: is torch_native"),
        ("--sglang-chat-template x.jinja", "chat_template: may not be set here: slime-hpc sends tokens"),
        ("--sglang-allow-auto-truncate", "a truncated prompt would not be the one that is trained on"),
        ("--sglang-disable-cuda-graph", "disable_cuda_graph: may not be set here: needs a GPU"),
        ("--timers x", "trainer.megatron.timers: may not be set here: takes a Python object"),
        ("--sglang-schedule-policy best", 'schedule_policy: "best" is not one of dfs-weight, fcfs, hrrn'),
        ("--sglang-page-size big", 'page_size: "big" is not a whole number (The number of tokens in a page)'),
        ("--sglang-page-size", "--sglang-page-size: needs a value"),
        ("--sglang-page-size --lr 1", "--sglang-page-size: needs a value"),
        ("--sglang-page-size 1 2", "--sglang-page-size: takes one value, but '1 2' follow it"),
        ("--sglang-disable-radix-cache 5", "--sglang-disable-radix-cache: takes no value, but '5' follows it"),
        ("--sglang-mem-fraction-static 1.5", "mem_fraction_static: 1.5 is not over 0 and under 1"),
        ("--wieght-decay 1", "--wieght-decay: not a Megatron or SGLang option; did you mean '--weight-decay'?"),
        ("--sglang-mem-fraction 1", "did you mean '--sglang-mem-fraction-static'?"),
        ("--sglang-no-such", "--sglang-no-such: not a Megatron or SGLang option"),
        ("--mem-fraction-static 0.8", "did you mean '--sglang-mem-fraction-static'?"),
        ("--rollout-batch-size 8", "did you mean --set sampling.rollout_batch_size=…?"),
        ("stray", "stray: not a Megatron or SGLang option"),
        ("--sglang-gc-threshold=[1", "--sglang-gc-threshold:1: not YAML"),
    ],
)
def test_flags_that_are_refused(load: Callable[..., Profile], refused: Refused, flags: str, message: str) -> None:
    assert message in refused(flags=tuple(flags.split()))


def test_all_bad_flags_are_reported_at_once(refused: Refused) -> None:
    message = refused(flags=("--no-such", "1", "--sglang-page-size", "--nor-this"))
    assert [line.split(":")[0] for line in message.splitlines()] == ["--no-such", "--sglang-page-size", "--nor-this"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.megatron.norm_epsilons=1", "not an argument of Megatron (megatron-core 0.16.1); did you mean"),
        (
            "rollout.sglang.mem_fraction=0.5",
            "not an argument of SGLang (sglang 0.5.23); did you mean 'mem_fraction_static'?",
        ),
        ("rollout.sglang.mem_fraction_static=", "mem_fraction_static: 0.5"),
        ("trainer.megatron.weight_decay=~", "trainer.megatron.weight_decay: null is not a number"),
        ("trainer.megatron={norm_epsilon: 1e-6, layernorm_epsilon: 1e-6}", "is another name of layernorm_epsilon"),
        ("trainer.megatron.disable_bias_linear=false", "add_bias_linear: true disagrees: the supported models"),
        ("trainer.megatron=[a]", 'trainer.megatron: ["a"] is not a mapping of keys'),
        ("rollout.sglang.crash_dump_folder=5", "5 is not text; write it in quotes"),
        ("trainer.megatron.tensor_model_parallel_size=two", '"two" is not a whole number'),
        ("rollout.sglang={mem_fraction_static: true}", "true is not a number"),
    ],
)
def test_keys_that_are_refused(load: Callable[..., Profile], refused: Refused, override: str, message: str) -> None:
    if message == "mem_fraction_static: 0.5":
        assert load(sets=(override,)).spec.rollout.sglang == {"mem_fraction_static": None}
    else:
        assert message in refused(override)


def test_other_spellings_become_the_arguments_own_name(load: Callable[..., Profile]) -> None:
    profile = load(sets=("trainer.megatron={no_rope_fusion: true, accumulate_allreduce_grads_in_fp32: true}",))
    assert profile.spec.trainer.megatron == {"apply_rope_fusion": False, "grad_reduce_in_fp32": True}


def test_the_line_of_a_key_is_named_whatever_its_spelling(
    load: Callable[..., Profile], quickstart: Path, refused: Refused
) -> None:
    text = quickstart.read_text().replace("trainer:\n", "trainer:\n  megatron:\n    norm_epsilon: 0.5\n")
    quickstart.write_text(text)
    line = 1 + text.splitlines().index("    norm_epsilon: 0.5")
    assert f"profile.yaml:{line}: trainer.megatron.layernorm_epsilon: 0.5 disagrees" in refused()


def test_a_model_that_does_not_say(refused: Refused) -> None:
    message = refused("trainer.megatron.num_layers=2")
    assert "cannot be compared: config.json of model.hf_checkpoint has no 'num_hidden_layers'; remove" in message


def test_settings_refuse_what_no_check_let_through() -> None:
    assert megatron_settings({"weight_decay": 0.1, "lr": 1}).optimizer == {"weight_decay": 0.1}
    with pytest.raises(UserError, match=r"trainer\.megatron\.num_experts: cannot be applied"):
        megatron_settings({"num_experts": 4})


def test_every_megatron_argument_is_decided_in_one_way() -> None:
    arguments = megatron_arguments()
    assert not APPLIED.keys() & DECIDED.keys()
    assert (APPLIED.keys() | DECIDED.keys() | FLAGS.keys()) <= arguments.keys()
    undecided = [n for n in arguments if n not in APPLIED and n not in DECIDED and megatron_refusal(n) is None]
    assert undecided == []
    assert not {a.name for a in ARGUMENTS} & load_snapshot("megatron-core").named().keys()


def test_every_refusal_of_sglang_is_of_something() -> None:
    names = load_snapshot("sglang").named()
    for table in (sglang.REFUSED, sglang.REFUSED_ON_CPU):
        idle = [p for p in table if not any(first_match({p: ""}, name) is not None for name in names)]
        assert idle == []
    assert sglang.INTERVALS.keys() <= names.keys()


def test_every_refusal_of_the_router_is_of_something() -> None:
    names = load_snapshot("sglang-router").named()
    assert [p for p in router.REFUSED if not any(first_match({p: ""}, name) is not None for name in names)] == []
    accepted = {name for name in names if router.router_refusal(name) is None}
    assert accepted == router.INTERVALS.keys() | {"policy", "assignment_mode"}


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--router-policy cache_aware", "policy", "cache_aware"),
        ("--router-cache-threshold=0.5 --router-policy random", "cache_threshold", 0.5),
        ("--router-balance-abs-threshold 4", "balance_abs_threshold", 4),
    ],
)
def test_router_flags(load: Callable[..., Profile], flags: str, key: str, value: object) -> None:
    assert load(*flags.split()).spec.rollout.router[key] == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--router-port 1", "rollout.router.port: may not be set here: slime-hpc starts the router"),
        ("--router-api-key x", "rollout.router.api_key: may not be set here: made fresh for each attempt"),
        ("--router-disable-retries", "rollout.router.disable_retries: may not be set here: slime-hpc decides"),
        ("--router-policy best", 'rollout.router.policy: "best" is not one of cache_aware, manual'),
        ("--router-cache-treshold 0.5", "did you mean '--router-cache-threshold'?"),
        ("--router-cache-threshold 2", "cache_threshold: 2 is not at least 0 and at most 1"),
    ],
)
def test_router_flags_that_are_refused(refused: Callable[..., str], flags: str, message: str) -> None:
    assert message in refused(flags=flags.split())


def test_no_flag_means_two_things() -> None:
    owners: dict[str, set[str]] = {}
    for engine in ENGINES:
        for argument in engine.arguments().values():
            for flag in (*argument.flags, *argument.off_flags):
                owners.setdefault(engine.prefix + flag.removeprefix("--"), set()).add(argument.name)
    assert {flag: names for flag, names in owners.items() if len(names) > 1} == {}
    assert len(owners) <= len(_known_flags())


def test_snapshots_survive_writing(tmp_path: Path) -> None:
    for package in ("sglang", "sglang-router", "megatron-core"):
        load_snapshot(package).write(tmp_path / "snapshot.json")
        assert Snapshot.model_validate_json((tmp_path / "snapshot.json").read_bytes()) == load_snapshot(package)


@pytest.mark.parametrize(
    ("installed", "sets", "warns"),
    [
        ("0.9.9", ("rollout.sglang.page_size=1",), True),
        ("0.9.9", (), False),
        ("0.5.23", ("rollout.sglang.page_size=1",), False),
    ],
)
def test_another_installed_version_is_warned_about(
    load: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch, installed: str, sets: tuple[str, ...], warns: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed)
    profile = load(sets=sets)
    plan = plan_job(profile.spec, profile.cluster, token="t", profile_dir=profile.directory, python="python")
    found = [
        warning for warning in plan_warnings(plan) if "sglang 0.5.23" in warning and "0.9.9 is installed" in warning
    ]
    assert bool(found) == warns


def test_a_login_node_without_engines_is_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert load_snapshot("sglang").stale() is None


def test_sbatch_options_are_spelt_as_sbatch_does() -> None:
    assert all("_" not in option for option in SBATCH_OWNED)


@pytest.mark.parametrize("by_flag", [True, False])
def test_the_command_line_wins_over_another_spelling_in_the_file(quickstart: Path, by_flag: bool) -> None:
    text = quickstart.read_text().replace(
        "trainer:", "trainer:\n  megatron: {accumulate_allreduce_grads_in_fp32: true}", 1
    )
    quickstart.write_text(text)
    name = "grad_reduce_in_fp32"
    given = (
        {"flags": [f"--{name.replace('_', '-')}=false"]} if by_flag else {"sets": [f"trainer.megatron.{name}=false"]}
    )
    spec = load_profile(quickstart, **given).spec
    assert megatron_settings(spec.trainer.megatron).ddp[name] is False
