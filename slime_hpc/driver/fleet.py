"""Trainer ranks and engines behind one face: ``loop.Fleet`` over Ray actors and HTTP."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_hpc.checkpoint import Manifest, commit, fingerprint, prune
from slime_hpc.driver.actors import gather
from slime_hpc.driver.deadline import within
from slime_hpc.driver.engines import Engines
from slime_hpc.driver.health import Member
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog
from slime_hpc.rewards.pool import RewardPool, reward_args
from slime_hpc.rollout.data import PromptSet, PromptSource
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.run_dir import RunDir
from slime_hpc.types import Groups, Role, TrainBatch, WeightVersion
from slime_hpc.weight_sync.channel import WeightChannel

GENERATE_TIMEOUT_S = 3600.0
TRAIN_TIMEOUT_S = 3600.0
SYNC_TIMEOUT_S = 600.0
SEND_TIMEOUT_S = 120.0
"""For the engines to join the weight group, and to take any one tensor."""
SAVE_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 15.0


@dataclass
class RayFleet:
    """Everything a run trains and generates with, once it is up."""

    plan: JobPlan
    run: RunDir
    log: EventLog
    trainers: Sequence[Member]
    """In order of rank."""
    engines: Engines
    router: RouterServer
    weights: WeightChannel
    prompts: PromptSource
    eval_prompts: Mapping[str, PromptSet]
    """By the name of their set."""
    rewards: RewardPool
    watchers: Sequence[asyncio.Task[None]]
    published: int = -1
    """Number of the newest version that all engines serve; after a resume, one less than that of the first."""
    lag: float = 0.0
    """Mean number of versions by which the round's samples are behind the trainer."""

    async def generate(self, round_: int) -> Groups:
        draws = self.prompts.next(self.plan.spec.sampling.rollout_batch_size)
        groups = await generate_groups(
            self.engines.router, draws, self.plan.spec.sampling, deadline_s=GENERATE_TIMEOUT_S
        )
        versions = [s.weight_version.number for group in groups for s in group if s.weight_version is not None]
        self.lag = self.published - statistics.fmean(versions or [self.published])
        return groups

    async def score(self, groups: Groups) -> None:
        samples = [sample for group in groups for sample in group]
        unverified = await self.rewards.score(samples, reward_args(self.plan.spec))
        if unverified:
            self.log("unverified", samples=[sample.index for sample in unverified], of=len(samples))

    async def evaluate(self) -> dict[str, Groups]:
        """Scored answers to the evaluation sets, one set after the other."""
        answers = {}
        for eval_set in self.plan.spec.eval.sets:
            sampling = eval_set.as_sampling(self.plan.spec.sampling)
            draws = self.eval_prompts[eval_set.name].draws()
            groups = await generate_groups(self.engines.router, draws, sampling, deadline_s=GENERATE_TIMEOUT_S)
            await self.score(groups)
            answers[eval_set.name] = groups
        return answers

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = (await self._all_ranks("train", TRAIN_TIMEOUT_S, batch))[0]
        return {**metrics, "rollout/weight_lag": self.lag}

    async def publish_weights(self) -> None:
        version = WeightVersion(self.plan.attempt, self.published + 1)
        await self.weights.publish(version)
        self.published = version.number

    async def save(self, round_: int) -> Manifest:
        """Ranks write their shards. The manifest, from their reports, makes a checkpoint of them: ``commit``."""
        directory = self.run.checkpoint(round_, self.plan.attempt)
        reports = await self._all_ranks("save", SAVE_TIMEOUT_S, directory)
        return Manifest(
            attempt=self.plan.attempt,
            round=round_,
            step=(await self._all_ranks("step", TRAIN_TIMEOUT_S))[0],
            weight_version=str(WeightVersion(self.plan.attempt, self.published)),
            data=self.prompts.state(),
            spec_fingerprint=fingerprint(self.plan.spec),
            shards=tuple(shard for rank in reports for shard in rank),
        )

    async def commit(self, saved: Manifest) -> None:
        checkpoint = await asyncio.to_thread(commit, self.run, saved)
        await asyncio.to_thread(prune, self.run, self.plan.spec.checkpoint.keep)
        self.log("checkpoint", round=saved.round, path=str(checkpoint.path))

    async def export(self) -> None:
        await self._all_ranks("export_hf", SAVE_TIMEOUT_S, self.run.model)

    async def stop(self) -> None:
        """End the engines, bounded; what is left the sweep finds."""
        for watcher in self.watchers:
            watcher.cancel()
        self.rewards.close()
        await self.engines.close()
        self.router.kill()
        try:
            await within(
                STOP_TIMEOUT_S,
                "the end of the engines",
                gather(Role.ROLLOUT, [e.actor.kill.remote() for e in self.engines.members]),
            )
        except Exception as error:  # noqa: BLE001 - the run is finished; the agents sweep their nodes next
            self.log("engines_not_stopped", detail=str(error))

    async def _all_ranks(self, method: str, seconds: float, *arguments: Any) -> list[Any]:
        return await all_ranks(self.trainers, method, seconds, *arguments)


@dataclass(frozen=True)
class TrainerWeights:
    """``weight_sync.channel.WeightSource``: all ranks gather the weights, rank 0 sends them."""

    trainers: Sequence[Member]

    async def listen(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._rank0("listen_for_engines", SEND_TIMEOUT_S)
        return address

    async def join(self, world_size: int, group_name: str) -> None:
        await self._rank0("join_engines", world_size, group_name)

    async def broadcast(self) -> None:
        await all_ranks(self.trainers, "broadcast", SYNC_TIMEOUT_S)

    async def close(self) -> None:
        await self._rank0("leave_engines")

    async def _rank0(self, method: str, *arguments: Any) -> Any:
        return (await all_ranks(self.trainers[:1], method, SYNC_TIMEOUT_S, *arguments))[0]


async def all_ranks(trainers: Sequence[Member], method: str, seconds: float, *arguments: Any) -> list[Any]:
    """Call a method of each and wait for all of them."""
    refs = [getattr(rank.actor, method).remote(*arguments) for rank in trainers]
    return await within(seconds, f"the trainer's {method}", gather(Role.TRAINER, refs))
