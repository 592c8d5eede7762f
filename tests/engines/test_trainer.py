"""Real Megatron-core ranks over gloo, against transformers and a plain torch step."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainer_pool as on_rank
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from slime_hpc.checkpoint import Manifest, commit, find_newest_complete, verify
from slime_hpc.errors import UserError
from slime_hpc.run_dir import RunDir
from slime_hpc.trainer.hf_weights import HfWeights
from slime_hpc.trainer.model import read_hf_config, require_divisible
from slime_hpc.types import LoadedState, TrainBatch

TOKENS = torch.randint(0, 512, (3, 24), generator=torch.Generator().manual_seed(1)).tolist()
TEMPERATURE = 0.7
SETTINGS = {"weight_decay": 0.1, "clip_grad": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3}
"""None of them megatron-core's default; the large epsilon keeps Adam from blowing up differences of 1e-8."""
LR = 1e-3


@pytest.fixture(scope="module")
def pool() -> Iterator[on_rank.Pool]:
    pool = on_rank.Pool(2)
    yield pool
    pool.close()


class Trainer:
    """Ranks 0 to ``world_size`` - 1 of the pool, set up as one trainer."""

    def __init__(self, pool: on_rank.Pool, world_size: int) -> None:
        self._pool = pool
        self.world_size = world_size

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(function, *args, ranks=self.world_size)


StartTrainer = Callable[..., Trainer]


@pytest.fixture
def start_trainer(pool: on_rank.Pool, tmp_path: Path) -> Iterator[StartTrainer]:
    started: list[Trainer] = []

    def start(model: Path, world_size: int, **settings: Any) -> Trainer:
        while started:
            started.pop()(on_rank.shutdown)
        trainer = Trainer(pool, world_size)
        address = trainer(on_rank.create, on_rank.trainer_plan(tmp_path, model, **settings), world_size)[0]
        started.append(trainer)
        trainer(on_rank.setup, *address)
        return trainer

    yield start
    while started:
        started.pop()(on_rank.shutdown)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "sp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "zero1": (1, {"use_distributed_optimizer": True}),
    "zero2": (2, {"use_distributed_optimizer": True}),
}
"""World size and Megatron arguments."""


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each supported type: Qwen2 has QKV biases, Llama here tied embeddings."""
    size = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float32",
    }
    configs = {
        "qwen2": Qwen2Config(**size, rope_theta=1e6),
        "llama": LlamaConfig(**size, tie_word_embeddings=True, rms_norm_eps=1e-5),
    }
    paths = {"qwen3": tiny_model}
    for name, config in configs.items():
        paths[name] = tmp_path_factory.mktemp("models") / name
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        model.save_pretrained(paths[name])
    return paths


def load_hf(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_model_is_the_one_transformers_loads(
    start_trainer: StartTrainer, models: dict[str, Path], model: str, layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    trainer = start_trainer(models[model], world_size, **parallel)
    reference = load_hf(models[model])
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    for logits in trainer(on_rank.logits, TOKENS):
        np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)

    stored = load_file(models[model] / "model.safetensors")
    exported = trainer(on_rank.weights)[0]
    assert exported.keys() == stored.keys()
    assert all(np.array_equal(exported[name], stored[name].numpy()) for name in stored)
    assert trainer(on_rank.metas)[0] == [(n, "float32", w.shape) for n, w in exported.items()]


def make_batch(samples: int, seed: int = 0) -> TrainBatch:
    """Samples of different lengths, some tokens masked; of several one has no advantage, the last no response."""
    rng = random.Random(seed)
    lengths = [(rng.randint(2, 6), rng.randint(3, 12)) for _ in range(samples)]
    advantages = [rng.uniform(-2, 2) for _ in lengths]
    if samples > 1:
        lengths[-1] = (4, 0)
        advantages[0] = 0.0
    return TrainBatch(
        tokens=[[rng.randrange(512) for _ in range(prompt + response)] for prompt, response in lengths],
        response_lengths=[response for _, response in lengths],
        loss_masks=[[int(i % 4 != 1) for i in range(response)] for _, response in lengths],
        rollout_log_probs=[[-rng.uniform(2, 8) for _ in range(response)] for _, response in lengths],
        advantages=advantages,
    )


class PlainTrainer:
    """The same step written down sample by sample, on the transformers model with torch's AdamW."""

    def __init__(self, path: Path) -> None:
        self.model = load_hf(path)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": SETTINGS["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
            lr=LR,
            betas=(SETTINGS["adam_beta1"], SETTINGS["adam_beta2"]),
            eps=SETTINGS["adam_eps"],
        )

    def train(self, batch: TrainBatch) -> dict[str, float]:
        loss, diff, largest = torch.zeros(()), 0.0, 0.0
        for tokens, count, mask, engine, advantage in zip(
            batch.tokens,
            batch.response_lengths,
            batch.loss_masks,
            batch.rollout_log_probs,
            batch.advantages,
            strict=True,
        ):
            if not count:
                continue
            logits = self.model(torch.tensor([tokens])).logits[0] / TEMPERATURE
            log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[-count:, 0]
            on = torch.tensor(mask, dtype=torch.bool)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = loss - (ratio * advantage)[on].mean() / len(batch.tokens)
            off = (log_probs.detach() - torch.tensor(engine)).abs()[on]
            diff += off.mean().item() / len(batch.tokens)
            largest = max(largest, off.max().item())
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS["clip_grad"]).item()
        self.optimizer.step()
        return {
            "train/loss": loss.item(),
            "train/pg_loss": loss.item(),
            "train/pg_clipfrac": 0.0,
            "train/grad_norm": grad_norm,
            "train/lr": LR,
            "train/train_rollout_logprob_abs_diff": diff,
            "train/train_rollout_logprob_abs_diff_max": largest,
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_is_the_one_a_plain_torch_trainer_makes(
    start_trainer: StartTrainer, tiny_model: Path, layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    trainer = start_trainer(
        tiny_model, world_size, temperature=TEMPERATURE, lr=LR, max_tokens=40, **parallel, **SETTINGS
    )
    plain = PlainTrainer(tiny_model)
    # The first two are cut into micro-batches; the third leaves a data-parallel rank without samples.
    for batch in (make_batch(5), make_batch(7, seed=1), make_batch(1)):
        expected = plain.train(batch)
        for metrics in trainer(on_rank.train, batch):
            assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)
            assert metrics["train/grad_norm"] > SETTINGS["clip_grad"], "or clipping is not tested"
    updated = trainer(on_rank.weights)[0]
    for name, parameter in plain.model.named_parameters():
        np.testing.assert_allclose(updated[name], parameter.detach().numpy(), atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_packed_samples_give_what_padded_ones_give(start_trainer: StartTrainer, tiny_model: Path, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    trainer = start_trainer(tiny_model, world_size, **parallel)
    sequences = make_batch(6).tokens
    for packed, padded in trainer(on_rank.packed_and_padded, sequences):
        assert packed.keys() == padded.keys()
        for name, value in padded.items():
            assert np.abs(value).max() > 1e-4
            np.testing.assert_allclose(packed[name], value, atol=1e-5, rtol=1e-5, err_msg=name)


def test_checkpoint_of_another_optimizer_is_refused(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path
) -> None:
    save_a_step(start_trainer(tiny_model, 1), tmp_path / "checkpoint")
    other = start_trainer(tiny_model, 1, use_distributed_optimizer=True)
    with pytest.raises(AssertionError, match=r"UserError: .*use_distributed_optimizer is true, and was false"):
        other(on_rank.load, tmp_path / "checkpoint")


def test_batch_without_any_response_token_changes_no_gradient_and_gives_no_nan(
    start_trainer: StartTrainer, tiny_model: Path
) -> None:
    trainer = start_trainer(tiny_model, 1, weight_decay=0.0)
    before = trainer(on_rank.weights)[0]
    batch = TrainBatch(
        tokens=[[5, 6], [7]],
        response_lengths=[0, 0],
        loss_masks=[[], []],
        rollout_log_probs=[[], []],
        advantages=[1.0, -1.0],
    )
    metrics = trainer(on_rank.train, batch)[0]
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0
    after = trainer(on_rank.weights)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_megatron_arguments_reach_megatron(start_trainer: StartTrainer, tiny_model: Path) -> None:
    trainer = start_trainer(tiny_model, 2, lr=LR, tensor_model_parallel_size=2, **SETTINGS)
    expected = {"lr": LR, "tensor_model_parallel_size": 2, **SETTINGS}
    assert trainer(on_rank.optimizer_settings) == [expected, expected]


WARM_UP_3_OF_10 = {"lr_warmup_iters": 3, "lr_decay_iters": 10, "min_lr": LR / 10}


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0, 1 / 3, 2 / 3, 1, 1]),
        ("linear", [0, 1 / 3, 2 / 3, 1, 1 - 0.9 / 7]),
        ("cosine", [0, 1 / 3, 2 / 3, 1, 0.1 + 0.45 * (1 + math.cos(math.pi / 7))]),
    ],
)
def test_the_learning_rate_follows_its_schedule_also_after_loading(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path, style: str, expected: list[float]
) -> None:
    settings = {"lr": LR, "schedule": {"lr_decay_style": style, **WARM_UP_3_OF_10}}
    trainer = start_trainer(tiny_model, 1, **settings)
    rates = [trainer(on_rank.train, make_batch(2))[0]["train/lr"] for _ in range(2)]
    trainer(on_rank.save, tmp_path / "checkpoint")
    resumed = start_trainer(tiny_model, 1, **settings)
    resumed(on_rank.load, tmp_path / "checkpoint")
    rates += [resumed(on_rank.train, make_batch(2))[0]["train/lr"] for _ in range(3)]
    assert rates == pytest.approx([LR * share for share in expected])


@pytest.mark.parametrize("layout", ["tp1", "zero1"])
def test_grad_norm_is_logged_when_nothing_is_clipped(
    start_trainer: StartTrainer, tiny_model: Path, layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    unclipped = start_trainer(tiny_model, world_size, clip_grad=0.0, **parallel)(on_rank.train, make_batch(5))[0]
    clipped = start_trainer(tiny_model, 1, clip_grad=0.5)(on_rank.train, make_batch(5))[0]
    assert unclipped["train/grad_norm"] == pytest.approx(clipped["train/grad_norm"])


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2", "zero2"])
def test_loaded_trainer_goes_on_bit_for_bit(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    settings = {"lr": LR, **parallel}
    run = RunDir(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)

    def go_on(trainer: Trainer) -> tuple[Any, ...]:
        metrics = [trainer(on_rank.train, make_batch(4, seed)) for seed in (8, 9)]
        return metrics, trainer(on_rank.draw), trainer(on_rank.weights)[0]

    trainer = start_trainer(tiny_model, world_size, **settings)
    for seed in (6, 7):
        trainer(on_rank.train, make_batch(4, seed))
    trainer(on_rank.draw)
    reports = trainer(on_rank.save, run.checkpoint(1, 1))
    metrics, drawn, weights = go_on(trainer)

    shards = tuple(shard for rank in reports for shard in rank)
    assert {s.name for s in shards} == {p.name for p in run.checkpoint(1, 1).iterdir()}, "every file is reported"
    manifest = Manifest(attempt=1, round=1, step=2, weight_version="a1.v1", data={}, spec_fingerprint="", shards=shards)
    commit(run, manifest)
    found = find_newest_complete(run)
    assert found is not None
    verify(found)

    resumed = start_trainer(tiny_model, world_size, **settings)
    assert resumed(on_rank.load, found.path) == [LoadedState(2, "restored")] * world_size
    metrics_again, drawn_again, weights_again = go_on(resumed)
    assert metrics_again == metrics
    assert drawn_again == drawn
    assert all(np.array_equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ("tp1", "tp2"),
        ("tp2", "tp1"),
        ("tp1", "dp2"),
        ("dp2", "tp1"),
        ("dp2", "sp2"),
        ("zero2", "zero1"),
        ("zero1", "zero2"),
    ],
)
def test_checkpoint_goes_on_in_another_layout(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path, saving: str, loading: str
) -> None:
    def start(layout: str, lr: float) -> Trainer:
        world_size, parallel = LAYOUTS[layout]
        schedule = {"lr_decay_style": "linear", **WARM_UP_3_OF_10}
        return start_trainer(tiny_model, world_size, lr=lr, schedule=schedule, **parallel, **SETTINGS)

    def state(trainer: Trainer) -> on_rank.Weights:
        return trainer(on_rank.weights)[0] | trainer(on_rank.moments)[0]

    first = start(saving, LR)
    for seed in (6, 7):
        first(on_rank.train, make_batch(4, seed))
    first(on_rank.save, tmp_path / "checkpoint")
    saved = state(first)
    next_step = first(on_rank.train, make_batch(4, 8))[0]
    then = state(first)

    second = start(loading, LR)
    assert set(second(on_rank.load, tmp_path / "checkpoint")) == {LoadedState(2, "reseeded")}
    loaded = state(second)
    assert loaded.keys() == saved.keys()
    assert all(np.array_equal(saved[name], loaded[name]) for name in saved)
    assert second(on_rank.train, make_batch(4, 8))[0] == pytest.approx(next_step, rel=2e-5, abs=1e-6)
    for name, value in state(second).items():
        np.testing.assert_allclose(value, then[name], atol=1e-5, rtol=0, err_msg=name)


def save_a_step(trainer: Trainer, directory: Path) -> None:
    trainer(on_rank.train, make_batch(2))
    trainer(on_rank.save, directory)


def test_reseeded_random_numbers_follow_from_seed_and_step(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path
) -> None:
    save_a_step(start_trainer(tiny_model, 1), tmp_path / "checkpoint")
    drawn = []
    for _ in range(2):
        trainer = start_trainer(tiny_model, 2, tensor_model_parallel_size=2)
        fresh = trainer(on_rank.draw)
        trainer(on_rank.load, tmp_path / "checkpoint")
        drawn.append(trainer(on_rank.draw))
        assert drawn[-1] != fresh
    assert drawn[0] == drawn[1]
    (shared, own), (shared_too, own_too) = ((ranks[:2], ranks[2:]) for ranks in drawn[0])
    assert shared == shared_too
    assert own != own_too


def test_hyperparameters_are_those_of_today(start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path) -> None:
    save_a_step(start_trainer(tiny_model, 1, lr=LR, **SETTINGS), tmp_path / "checkpoint")
    today = start_trainer(tiny_model, 1, lr=LR / 2, adam_beta1=0.7, adam_eps=1e-5, weight_decay=0.3)
    expected = today(on_rank.hyperparameters)[0]
    today(on_rank.load, tmp_path / "checkpoint")
    for group, before in zip(today(on_rank.hyperparameters)[0], expected, strict=True):
        assert {name: group[name] for name in before} == before


def damage_common(directory: Path) -> None:
    (directory / "common.pt").write_bytes(b"no pickle")


def damage_shard(directory: Path) -> None:
    shard = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:1000])


def remove_common(directory: Path) -> None:
    (directory / "common.pt").unlink()


def remove_shard(directory: Path) -> None:
    next(directory.glob("*.distcp")).unlink()


def remove_metadata(directory: Path) -> None:
    (directory / ".metadata").unlink()


def test_damaged_checkpoint_is_named(start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path) -> None:
    trainer = start_trainer(tiny_model, 1)
    save_a_step(trainer, tmp_path / "good")
    for number, damage in enumerate((damage_common, damage_shard, remove_common, remove_shard, remove_metadata)):
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "good", directory)
        damage(directory)
        with pytest.raises(
            AssertionError, match=rf"ClusterError: checkpoint {directory} cannot be loaded: .*older one"
        ):
            trainer(on_rank.load, directory)


def test_exported_model_loads_in_transformers(start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out" / "model"
    trainer = start_trainer(tiny_model, 2, lr=LR, tensor_model_parallel_size=2)
    trainer(on_rank.export, directory)
    trainer(on_rank.train, make_batch(4))
    trainer(on_rank.export, directory)
    assert [p.name for p in directory.parent.iterdir()] == ["model"], "the older export is replaced"
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(trainer(on_rank.logits, TOKENS)[0], expected, atol=1e-5, rtol=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (directory / name).read_bytes() == (tiny_model / name).read_bytes()


def test_unsupported_models_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    for change, message in (
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'linear'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            read_hf_config(tmp_path)


def test_tensor_parallel_size_that_does_not_divide_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"tensor_model_parallel_size 4 does not divide .*num_key_value_heads \(2\)"):
        require_divisible(AutoConfig.from_pretrained(tiny_model), 4)


def test_weights_of_another_shape_are_refused(start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    (tmp_path / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    message = r"embed_tokens\.weight has shape \(512, 64\), but config\.json asks for \(256, 64\)"
    with pytest.raises(AssertionError, match=message):
        start_trainer(tmp_path, 1)


def test_missing_and_unknown_tensors_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = set(tensors)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks model\.norm\.weight"):
        HfWeights(tmp_path).require_exactly(names, tied=False)
    save_file(
        {**load_file(tiny_model / "model.safetensors"), "visual.weight": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match=r"holds visual\.weight"):
        HfWeights(tmp_path).require_exactly(names, tied=False)


def test_one_process_exports_what_two_ranks_saved(
    start_trainer: StartTrainer, tiny_model: Path, tmp_path: Path
) -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer = start_trainer(tiny_model, 2, lr=LR, **parallel)
    trainer(on_rank.train, make_batch(4))
    trainer(on_rank.save, tmp_path / "checkpoint")
    trainer(on_rank.export, tmp_path / "model")
    plan = on_rank.trainer_plan(tmp_path, tiny_model, **parallel)
    code = (
        "import sys; from pathlib import Path; from slime_hpc.plan import JobPlan\n"
        "from slime_hpc.trainer.export import export_checkpoint\n"
        "checkpoint, directory = map(Path, sys.argv[1:])\n"
        "export_checkpoint(JobPlan.model_validate_json(sys.stdin.read()), checkpoint, directory, {'round': 0})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoint"), str(tmp_path / "alone")]
    subprocess.run(command, input=plan.model_dump_json(), text=True, check=True, timeout=120)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {path.name for path in (tmp_path / "alone").iterdir()} == files | {"slime_hpc_export.json"}
    for name in files:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "model" / name).read_bytes(), name
