"""From a file to a checked spec: scalar rules, findings, overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_hpc.errors import ProfileError
from slime_hpc.spec.load import load_profile, shipped_cluster_profiles
from slime_hpc.spec.run import RunSpec
from slime_hpc.spec.yaml_tree import parse_scalar, parse_yaml

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4:00:00", "4:00:00"),
        ("no", "no"),
        ("off", "off"),
        ("0123", "0123"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("1e999", "1e999"),
        (".nan", ".nan"),
        ("2026-01-01", "2026-01-01"),
        ("1e-6", 1e-6),
        ("5.", 5.0),
        ("-3", -3),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
    ],
)
def test_scalar_rules(text: str, value: object) -> None:
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)


def test_quoted_is_text() -> None:
    assert parse_yaml("a: '1'\nb: \"true\"\nc: |\n  3\n", "f").values == {"a": "1", "b": "true", "c": "3\n"}


def test_anchors() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: *x\n", "f").values == {"a": [1, 2], "b": [1, 2]}


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 19)
)
"""10¹⁹ values, were they all looked at."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3: a: given twice, first at f:1; remove one"),
        ("a:\n\tb: 1\n", "f:2: not YAML: while scanning for the next token found character '\\t' that cannot start"),
        ("a: [1\n", "f:2: not YAML"),
        ("- 1\n", "f:1: is not a mapping"),
        ("", "f: is empty"),
        ("# only a comment\n", "f: is empty"),
        ("a: !!python/name:os.system x\n", "f:1: a: the tag tag:yaml.org,2002:python/name:os.system is not allowed"),
        ("a: &x [*x]\n", "f:1: a.0: contains itself"),
        ("? [1]\n: 2\n", "f:1: a key must be a word"),
        ("a: 1\n---\nb: 2\n", "f:2: not YAML: expected a single document"),
        ("a: \x00\n", "f: not text that YAML allows"),
        ("a: " + "[" * 5000, "f: nested too deeply"),
        ("a: " + "[" * 30 + "]" * 30, "f:1: a.0.0: holds over 20 levels: no profile needs that"),
        (BOMB, "holds more than 10000 values, aliases counted: no profile needs that"),
    ],
)
def test_bad_yaml(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as error:
        parse_yaml(text, "f")
    assert message in str(error.value)


@given(st.text())
def test_any_text_is_a_tree_or_a_finding(text: str) -> None:
    try:
        parse_yaml(text, "f")
    except ProfileError as error:
        assert str(error)


def test_quickstart_loads(quickstart: Path) -> None:
    profile = load_profile(quickstart)
    assert profile.cluster.device == "cpu"
    assert profile.spec.time_limit_s == 30 * 60
    assert profile.spec.run_dir == quickstart.parents[2] / "runs" / "quickstart"
    assert profile.spec.algorithm.lr == 5e-3
    assert RunSpec.model_validate_json(profile.spec.model_dump_json()) == profile.spec


def test_every_shipped_cluster_profile_loads() -> None:
    from slime_hpc.spec.load import load_cluster

    names = [path.stem for path in shipped_cluster_profiles().glob("*.yaml")]
    assert "devcluster" in names
    assert [load_cluster(name, Path()).name for name in names] == names


def test_findings_come_all_at_once_with_their_lines(quickstart: Path) -> None:
    text = quickstart.read_text().replace("num_rollout: 50 ", "num_rollouts: 50 ")
    text = text.replace("  nodes: 1", "  nodes: two", 1)
    quickstart.write_text(text)
    (quickstart.parent / "model" / "tokenizer.json").unlink()
    with pytest.raises(ProfileError) as error:
        load_profile(quickstart, sets=["sampling.top_p=1"])
    lines = text.splitlines()
    where = {f.path: f.where.rpartition(":")[2] for f in error.value.findings}
    assert where["num_rollouts"] == str(1 + next(i for i, line in enumerate(lines) if "num_rollouts" in line))
    assert where["trainer.nodes"] == str(1 + lines.index("  nodes: two"))
    assert "num_rollout" not in where, "the missing key is the misspelt one, which is told once"
    assert where["sampling.top_p"] == "--set sampling.top_p=1"
    assert "did you mean 'num_rollout'?" in str(error.value)


def test_a_misspelt_required_key_is_told_once_and_another_missing_one_beside_it(quickstart: Path) -> None:
    text = quickstart.read_text().replace("partition: train", "partiton: train").replace("account: dev\n", "")
    quickstart.write_text(text.replace("time_limit: 30", "# 30"))
    with pytest.raises(ProfileError) as error:
        load_profile(quickstart)
    said = {finding.path: finding.message for finding in error.value.findings}
    assert said == {
        "time_limit": "is missing, and has no default",
        "trainer.partiton": "unknown key; did you mean 'partition'?",
    }


def test_unknown_keys_do_not_hide_the_cross_checks(quickstart: Path, refused: Refused) -> None:
    (quickstart.parent / "model" / "tokenizer.json").unlink()
    message = refused("trainer.gpus=1", "rollout.gpus_per_node=4", "rollout.gpus_per_engine=3")
    assert "trainer.gpus: unknown key; did you mean 'gpus_per_node'?" in message
    assert "rollout.gpus_per_engine: 3 does not divide gpus_per_node (4)" in message
    assert "has no tokenizer.json; copy it from" in message


def test_shapes_that_do_not_fit(refused: Refused) -> None:
    message = refused("trainer.nodes=2", "trainer.gpus_per_node=2", "trainer.megatron.tensor_model_parallel_size=3")
    assert "3 does not divide the trainer's 4 (2 nodes × 2 ranks a node = 4 ranks)" in message
    message = refused("rollout.gpus_per_node=4", "rollout.gpus_per_engine=2")
    assert "rollout.gpus_per_engine: 2 GPUs an engine, but this version has run engines of one only" in message


def test_several_ranks_and_engines(quickstart: Path) -> None:
    shape = ("trainer.nodes=2", "trainer.gpus_per_node=2", "rollout.nodes=2", "rollout.gpus_per_node=4")
    spec = load_profile(quickstart, sets=[*shape, "trainer.megatron.tensor_model_parallel_size=4"]).spec
    assert (spec.trainer.nodes, spec.rollout.nodes) == (2, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.nodes=two", 'trainer.nodes: "two" is not a whole number'),
        ("trainer.nodes=true", "trainer.nodes: true is not a whole number"),
        ("trainer.nodes='1'", 'trainer.nodes: "1" is not a whole number'),
        ("trainer.nodes=0", "trainer.nodes: 0: input should be greater than or equal to 1"),
        ("sampling.ignore_eos=yes", 'sampling.ignore_eos: "yes" is not true or false'),
        ("environment.variables={A: 1}", "environment.variables.A: 1 is not text; write it in quotes"),
        ("environment.variables={A-B: x}", "environment.variables.A-B: 'A-B' is not a name the shell can export"),
        ("environment.setup=abc", 'environment.setup: "abc" is not a list'),
        ("model=abc", 'model: "abc" is not a mapping of keys'),
        ("time_limit=1:2:3:4", "time_limit: '1:2:3:4' is not a Slurm time (write 90 for minutes"),
        ("time_limit_s=1800", "time_limit_s: unknown key; did you mean 'time_limit'?"),
        ("lr=1e-6", "lr: unknown key; did you mean algorithm.lr?"),
        ("layout=split", "layout: \"split\" is not one of 'het'"),
        ("name=a b", "name: 'a b' is not a name"),
        ("cluster=devclster", "cluster: no cluster profile is named 'devclster'; did you mean 'devcluster'?"),
        ("cluster=./nowhere.yaml", "does not exist"),
        ("run_dir=$NOPE/x", 'run_dir: "$NOPE/x": $NOPE is not known here; write the path out'),
        ("run_dir=''", 'run_dir: "": is empty'),
        ("run_dir=/tmp/100%j", 'has "%", which Slurm\'s output option cannot take'),
        ('run_dir="/tmp/a\\nb"', "which Slurm's output option cannot take"),
        ("trainer.megatron.tensor_model_parallel_size=3", "3 does not divide the trainer's 1"),
        ("trainer.gpus_per_node=5", "trainer.gpus_per_node: 5 is over the 4 GPUs a node has in partition 'train'"),
        ("trainer.cpus_per_task=99", "trainer.cpus_per_task: 99 is over the 8 CPUs"),
        ("trainer.mem=1T", "trainer.mem: 1048576 is over the 262144 MB"),
        (
            "trainer.partition=other",
            "trainer.partition: 'other' is not in cluster profile 'devcluster'; known: rollout, train",
        ),
        (
            "trainer.partition=trian",
            "'trian' is not in cluster profile 'devcluster'; did you mean 'train'? (if it is right",
        ),
        ("trainer.qos=high", "rollout.qos: is missing: sbatch would carry trainer.qos (high) over; set both"),
        ("trainer.sbatch={time: 3}", "trainer.sbatch.time: may not be set here: set the component's time_limit"),
        ("trainer.sbatch={ntasks_per_node: 3}", "may not be set here: one task a node"),
        ("trainer.sbatch={x: n1}", "'x' is not the long name of an sbatch option"),
        ("algorithm.eps_clip=1.5", "algorithm.eps_clip: 1.5 is not between 0 and 1"),
        ("algorithm.min_lr=1", "algorithm.min_lr: 1 is above lr (0.005)"),
        ("algorithm.lr_decay_iters=9", "algorithm.lr_decay_iters: has no effect on a constant rate; leave it out, or"),
        ("algorithm.lr_warmup_iters=50", "50 rounds of warm-up do not end before round 50"),
        ("algorithm.eps_clip_high=0.1", "algorithm.eps_clip_high: 0.1 is below eps_clip (0.2)"),
        ("sampling.n_samples_per_prompt=1", "every advantage would be 0"),
        ("data.input_key=text", "prompts.jsonl:1: no key 'text' (data.input_key); the row has 'input'"),
        ("data.prompt_data=reward.py", "reward.py:1: not JSON"),
        ("data.prompt_data=prompts.jsonl@[99:]", "prompts.jsonl@[99:] holds no prompt"),
        ("data.prompt_data=prompts.jsonl@[x]", "does not end in a slice such as @[0:100]"),
        ("data.reasoning_gym={dataset: x, size: 1}", "data: needs either prompt_data (a file) or reasoning_gym"),
        ("data.reasoning_gym={dataset: x, sizes: 1}", "data.reasoning_gym.sizes: unknown key; did you mean 'size'?"),
        ("data={reasoning_gym: {dataset: chain_sums, size: 1}}", "no dataset 'chain_sums'; did you mean 'chain_sum'?"),
        (
            "data={reasoning_gym: {dataset: chain_sum, size: 1}, label_key: x}",
            "data.label_key: has no effect with reasoning_gym, whose keys are fixed; remove it",
        ),
        ("data.tool_key=input", "data.tool_key: has no effect without a chat template"),
        ("reward.rm_type=math", "reward: needs either rm_type (math or reasoning_gym) or custom_rm_path"),
        ("reward={}", "reward: needs either rm_type (math or reasoning_gym) or custom_rm_path"),
        ("reward={rm_type: maths}", "reward.rm_type: 'maths' is not a verifier of this version; did you mean 'math'?"),
        ("reward={rm_type: dapo}", "'dapo' is not a verifier of this version; known: math, reasoning_gym; or write"),
        ("reward={rm_type: math}", "reward.rm_type: 'math' compares with the label, but data.label_key does not say"),
        ("reward={rm_type: reasoning_gym}", "'reasoning_gym' needs tasks of that package, but data reads"),
        ("eval.interval=3", "eval.interval: has no effect without eval.sets"),
        ("eval.sets=[{name: a}]", "eval.sets.0: needs either prompt_data (a file) or reasoning_gym"),
        ("eval.sets=[{nmae: a, prompt_data: x}]", "eval.sets.0.nmae: unknown key; did you mean 'name'?"),
        ("eval.sets=[{name: a, prompt_data: x}]", "x cannot be read: No such file"),
        (
            "eval.sets=[{name: a, prompt_data: prompts.jsonl, n_samples_per_eval_prompt: 4}]",
            "eval.sets.0.n_samples_per_eval_prompt: 4 samples at temperature 0 are all the same",
        ),
        (
            "eval.sets=[{name: a, prompt_data: prompts.jsonl}, {name: a, prompt_data: prompts.jsonl}]",
            "eval.sets.1.name: 'a' is the name of another set too",
        ),
        ("data.prompt_data=none.jsonl", "none.jsonl cannot be read: No such file or directory"),
        ("model.hf_checkpoint=nothing", "does not exist; it is a path"),
        ("model.hf_checkpoint=reward.py", "is not a directory"),
        ("reward.custom_rm_path=reward", "'reward' is not of the form module.function"),
        ("reward.custom_rm_path=reward.share", "defines no 'share'; did you mean 'share_of_target_tokens'?"),
        ("reward.custom_rm_path=rewards.grade", "no module 'rewards'"),
        ("reward.custom_rm_path=__main__.grade", "no module '__main__'"),
        ("seed=-1", "seed: "),
        ("seed=2147483648", "seed: "),
        ("data={prompt_dat: prompts.jsonl}", "data.prompt_dat: unknown key; did you mean 'prompt_data'?"),
        ("reward={custom_rm: reward.f}", "reward.custom_rm: unknown key; did you mean 'custom_rm_path'?"),
        ("eval.sets=[{name: a, prompt: x}]", "eval.sets.0.prompt: unknown key; did you mean 'prompt_data'?"),
        ('name="\\ud83d"', "name"),
        ("name.first=x", "name: has no keys below it to set"),
        ("nonsense", "is not of the form key.subkey=value"),
        ("a=[1", "not YAML"),
    ],
)
def test_one_mistake(refused: Refused, override: str, message: str) -> None:
    assert message in refused(override)


def test_evaluation_sets_are_read_like_the_training_data(quickstart: Path) -> None:
    sets = ["eval.sets=[{name: a, prompt_data: 'prompts.jsonl@[:2]'}]", "data.rollout_shuffle=false"]
    spec = load_profile(quickstart, sets=[*sets, "eval.sets.0.eval_max_response_len=7"]).spec
    data, sampling = spec.eval.sets[0].as_data(spec.data), spec.eval.sets[0].as_sampling(spec.sampling)
    assert data.prompt_data == quickstart.parent / "prompts.jsonl@[:2]"
    assert (data.input_key, data.apply_chat_template) == (spec.data.input_key, spec.data.apply_chat_template)
    assert (sampling.rollout_max_response_len, sampling.rollout_temperature, sampling.n_samples_per_prompt) == (7, 0, 1)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_smollm2_loads() -> None:
    """But for the model, which its script makes."""
    with pytest.raises(ProfileError) as error:
        load_profile(
            Path(__file__).parents[2] / "examples" / "smollm2" / "profile.yaml", sets=["model.hf_checkpoint=no"]
        )
    assert [finding.path for finding in error.value.findings] == ["model.hf_checkpoint"]


def test_held_out_tasks_need_a_seed_far_away(quickstart: Path, refused: Refused) -> None:
    tasks = "reasoning_gym: {dataset: chain_sum, size: 10, seed: "
    data = f"data={{{tasks} 1}}}}"
    held_out = "eval.sets=[{name: a, held_out: true, " + tasks
    assert "eval.sets.0.reasoning_gym.seed: with 10 some tasks" in refused(data, f"{held_out}10}}}}]")
    assert "use 11 or more" in refused(data, f"{held_out}10}}}}]")
    assert load_profile(quickstart, sets=[data, f"{held_out}11}}}}]"]).spec.eval.sets[0].held_out


def test_a_good_profile_has_just_the_one_finding(refused: Refused) -> None:
    assert refused("lr=1").count("\n") == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_model(quickstart: Path, refused: Refused, name: str) -> None:
    (quickstart.parent / "model" / name).unlink()
    assert f"/model has no {name.replace('model', '*')}; copy it" in refused()


def test_no_file_a_directory_a_binary(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, message in (
        (tmp_path / "none.yaml", "does not exist"),
        (tmp_path, "is a directory; name a file in it"),
        (binary, "is not a text file"),
    ):
        with pytest.raises(ProfileError, match=message):
            load_profile(path)


def test_cuda_is_refused(quickstart: Path, refused: Refused) -> None:
    big = quickstart.parent / "big.yaml"
    big.write_text("name: big\ndevice: cuda\npartitions:\n  train: {gpus_per_node: 1, cpus_per_node: 8}\n")
    message = refused("cluster=big.yaml", "rollout.cpus_per_task=2")
    assert "cluster: 'big' has `device: cuda`, which this version has not run on yet" in message


def test_long_scratch_is_refused(quickstart: Path, refused: Refused) -> None:
    (quickstart.parent / "deep.yaml").write_text(f"name: deep\ndevice: cpu\nscratch: /{'s' * 25}\n")
    assert "has 26 bytes, but Ray's sockets need a path of at most 25" in refused("cluster=deep.yaml")


def test_mistake_in_a_cluster_profile(quickstart: Path, refused: Refused) -> None:
    (quickstart.parent / "odd.yaml").write_text("name: odd\npartitions:\n  train:\n    gpus: 4\n")
    message = refused("cluster=odd.yaml")
    assert "odd.yaml:4: partitions.train.gpus: unknown key; did you mean 'gpus_per_node'?" in message


def test_overrides(quickstart: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    profile = load_profile(
        quickstart,
        sets=["run_dir=$SCRATCH/run", "time_limit=1:00:00", "environment.setup=[module purge, source x]"],
        flags=["--sglang-mem-fraction-static", "0.8", "--weight-decay=0.1"],
    )
    assert profile.spec.run_dir == tmp_path / "run"
    assert profile.spec.time_limit_s == 3600
    assert profile.spec.environment.setup == ("module purge", "source x")
    assert profile.spec.rollout.sglang == {"mem_fraction_static": 0.8}
    assert profile.spec.trainer.megatron == {"weight_decay": 0.1}


def test_a_reward_may_be_defined_in_any_branch(quickstart: Path) -> None:
    lines = ["try:", "    import fast", "except ImportError:", "    def grade(args, sample): return 0.0"]
    (quickstart.parent / "graded.py").write_text("\n".join([*lines, "if lines := 1:", "    other: object = grade"]))
    (quickstart.parent / "starred.py").write_text("from graded import *")
    for path in ("graded.grade", "graded.other", "starred.grade"):
        assert load_profile(quickstart, sets=[f"reward.custom_rm_path={path}"]).spec.reward.custom_rm_path == path


@pytest.mark.parametrize("label", ["null", "true", '""', '" "', "[1]", "{}"])
def test_math_needs_an_answer_to_compare_with(quickstart: Path, refused: Refused, label: str) -> None:
    rows = ['{"input": "1+1", "label": 2}', f'{{"input": "a", "label": {label}}}']
    (quickstart.parent / "math.jsonl").write_text("\n".join(rows))
    sets = ("data={prompt_data: math.jsonl, label_key: label}", "reward={rm_type: math}")
    assert "math.jsonl:2: the label is" in refused(*sets) and "needs the answer" in refused(*sets)
