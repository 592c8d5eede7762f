"""Trainer ranks and engines behind one face: ``loop.Fleet`` over Ray actors and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_hpc.checkpoint import Manifest, commit, fingerprint, prune
from slime_hpc.driver.actors import gather
from slime_hpc.driver.deadline import within
from slime_hpc.driver.health import Member
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog
from slime_hpc.rewards.pool import RewardPool, reward_args
from slime_hpc.rollout.client import EngineClient
from slime_hpc.rollout.data import PromptSource
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.run_dir import RunDir
from slime_hpc.types import Groups, Role, TensorMeta, TrainBatch, WeightVersion
from slime_hpc.weight_sync.transaction import publish

GENERATE_TIMEOUT_S = 3600.0
TRAIN_TIMEOUT_S = 3600.0
SYNC_TIMEOUT_S = 600.0
SAVE_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Roles:
    """Trainer and engines, loaded and watched over."""

    trainers: Sequence[Member]
    """In order of rank."""
    engines: Sequence[Member]
    clients: Sequence[EngineClient]
    """Of the engines, in their order."""
    tensors: Sequence[TensorMeta]
    """What a weight sync transfers, in order."""
    watchers: Sequence[asyncio.Task[None]]


@dataclass
class RayFleet:
    """Everything a run trains and generates with, once it is up."""

    plan: JobPlan
    run: RunDir
    log: EventLog
    roles: Roles
    weight_group: str
    prompts: PromptSource
    rewards: RewardPool
    published: int = -1
    """Number of the newest version that all engines serve."""

    async def generate(self, round_: int) -> Groups:
        draws = self.prompts.next(self.plan.spec.sampling.rollout_batch_size)
        return await generate_groups(self.roles.clients, draws, self.plan.spec.sampling, deadline_s=GENERATE_TIMEOUT_S)

    async def score(self, groups: Groups) -> None:
        samples = [sample for group in groups for sample in group]
        await self.rewards.score(samples, reward_args(self.plan.spec))

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = (await self._all_ranks("train", TRAIN_TIMEOUT_S, batch))[0]
        return metrics

    async def publish_weights(self) -> None:
        version = WeightVersion(self.plan.attempt, self.published + 1)

        async def broadcast() -> None:
            await self._all_ranks("broadcast", SYNC_TIMEOUT_S)

        await publish(
            self.roles.clients,
            broadcast,
            self.roles.tensors,
            version=version,
            group_name=self.weight_group,
            deadline_s=SYNC_TIMEOUT_S,
        )
        self.published = version.number

    async def save(self, round_: int) -> None:
        """Ranks write their shards; the manifest, from their reports, makes it a checkpoint."""
        directory = self.run.checkpoint(round_, self.plan.attempt)
        reports = await self._all_ranks("save", SAVE_TIMEOUT_S, directory)
        manifest = Manifest(
            attempt=self.plan.attempt,
            round=round_,
            step=(await self._all_ranks("step", TRAIN_TIMEOUT_S))[0],
            weight_version=str(WeightVersion(self.plan.attempt, self.published)),
            data=self.prompts.state(),
            spec_fingerprint=fingerprint(self.plan.spec),
            shards=tuple(shard for rank in reports for shard in rank),
        )
        commit(self.run, manifest)
        prune(self.run, self.plan.spec.checkpoint.keep)
        self.log("checkpoint", round=round_, path=str(directory))

    async def export(self) -> None:
        await self._all_ranks("export_hf", SAVE_TIMEOUT_S, self.run.model)

    async def stop(self) -> None:
        """End the engines, bounded; what is left the sweep finds."""
        for watcher in self.roles.watchers:
            watcher.cancel()
        self.rewards.close()
        for client in self.roles.clients:
            await client.__aexit__(None, None, None)
        try:
            await within(
                STOP_TIMEOUT_S,
                "the end of the engines",
                gather(Role.ROLLOUT, [e.actor.kill.remote() for e in self.roles.engines]),
            )
        except Exception as error:  # noqa: BLE001 - the run is finished; the agents sweep their nodes next
            self.log("engines_not_stopped", detail=str(error))

    async def _all_ranks(self, method: str, seconds: float, *arguments: Any) -> list[Any]:
        refs = [getattr(rank.actor, method).remote(*arguments) for rank in self.roles.trainers]
        return await within(seconds, f"the trainer's {method}", gather(Role.TRAINER, refs))
