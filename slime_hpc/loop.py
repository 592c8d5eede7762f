"""The RL loop: generate → reward → train → sync weights → save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from slime_hpc.algorithm import grpo_advantages
from slime_hpc.checkpoint import Manifest
from slime_hpc.errors import RunFailed
from slime_hpc.spec.run import Algorithm, RunSpec
from slime_hpc.types import Groups, Sample, TrainBatch


class Fleet(Protocol):
    """Trainer, engines and data as the loop sees them; every wait inside has its deadline."""

    async def generate(self, round_: int) -> Groups: ...

    async def score(self, groups: Groups) -> None: ...

    async def evaluate(self) -> dict[str, Groups]: ...

    async def train(self, batch: TrainBatch) -> dict[str, float]: ...

    async def publish_weights(self) -> None: ...

    async def save(self, round_: int) -> Manifest: ...

    async def commit(self, saved: Manifest) -> None: ...

    async def export(self) -> None: ...


class Recorder(Protocol):
    """Where the loop says how far it is, and what came of a round."""

    def phase(self, name: str, round_: int) -> None: ...

    def evaluated(self, rounds: int, sets: dict[str, Groups]) -> dict[str, float]: ...

    def round_done(self, round_: int, groups: Groups, metrics: dict[str, Any]) -> None: ...

    def finished(self, groups: Groups) -> None: ...


async def run_rounds(fleet: Fleet, recorder: Recorder, spec: RunSpec, first_round: int = 0) -> None:
    """Train up to ``num_rollout`` rounds, then let the trained policy answer once more, and export it."""
    await fleet.publish_weights()
    if first_round == 0:
        recorder.phase("eval", 0)
        recorder.evaluated(0, await fleet.evaluate())
    for round_ in range(first_round, spec.num_rollout):
        clock = Clock(recorder, round_)
        with clock("rollout"):
            groups = await fleet.generate(round_)
        with clock("reward"):
            await fleet.score(groups)
        with clock("train"):
            trained = await fleet.train(make_batch(groups, spec.algorithm))
            require_finite(trained, round_)
        with clock("update_weights"):
            await fleet.publish_weights()
        if spec.eval.sets and is_due(round_, spec.num_rollout, spec.eval.interval):
            with clock("eval"):
                trained |= recorder.evaluated(round_ + 1, await fleet.evaluate())
        saved = None
        if is_due(round_, spec.num_rollout, spec.checkpoint.interval):
            with clock("save"):
                saved = await fleet.save(round_)
        recorder.round_done(round_, groups, {**trained, **clock.metrics()})
        if saved is not None:
            await fleet.commit(saved)  # last, since nothing of a round with a checkpoint is done or recorded again
    recorder.phase("export", spec.num_rollout)
    await fleet.export()
    groups = await fleet.generate(spec.num_rollout)
    await fleet.score(groups)
    recorder.finished(groups)


class Clock:
    """Seconds of each phase of a round, under slime's names (``perf/rollout_time``, …)."""

    def __init__(self, recorder: Recorder, round_: int) -> None:
        self._recorder = recorder
        self._round = round_
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._recorder.phase(phase, self._round)
        began = time.monotonic()
        yield
        self._seconds[phase] = time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        phases = {f"perf/{phase}_time": seconds for phase, seconds in self._seconds.items()}
        return {**phases, "perf/step_time": time.monotonic() - self._started}


def require_finite(metrics: dict[str, float], round_: int) -> None:
    """RunFailed before a policy that is no longer one is published or saved."""
    broken = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        raise RunFailed(f"training broke in round {round_}: {', '.join(broken)}; lower algorithm.lr, or clip gradients")


def is_due(round_: int, num_rollout: int, interval: int | None) -> bool:
    """Every ``interval`` rounds, and after the last."""
    return round_ + 1 == num_rollout or (interval is not None and (round_ + 1) % interval == 0)


def make_batch(groups: Sequence[Sequence[Sample]], algorithm: Algorithm) -> TrainBatch:
    """One round's scored samples with their advantages, group by group."""
    rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
    advantages = grpo_advantages(rewards, normalize_std=not algorithm.disable_grpo_std_normalization)
    samples = [sample for group in groups for sample in group]
    return TrainBatch(
        tokens=[sample.tokens for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        loss_masks=[sample.loss_mask or [] for sample in samples],
        rollout_log_probs=[sample.rollout_log_probs for sample in samples],
        advantages=advantages.flatten().tolist(),
    )
