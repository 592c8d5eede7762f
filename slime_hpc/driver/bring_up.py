"""From an empty Ray cluster to a fleet: raylets, actors, engines, weight group. What can load at once does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import ray

from slime_hpc.device import get_device
from slime_hpc.driver.actors import EngineActor, TrainerActor, gather
from slime_hpc.driver.deadline import say, until, within
from slime_hpc.driver.fleet import SYNC_TIMEOUT_S, RayFleet, Roles
from slime_hpc.driver.health import Member, Tell, watch_actor, watch_engine
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog, read_json
from slime_hpc.rewards.pool import RewardPool
from slime_hpc.rollout.client import EngineClient, EngineKeys
from slime_hpc.rollout.data import PromptSource
from slime_hpc.run_dir import RunDir
from slime_hpc.types import Role, TensorMeta
from slime_hpc.weight_sync.transaction import connect, group_name

HEAD_TIMEOUT_S = 300.0
RAYLETS_TIMEOUT_S = 300.0
ACTORS_TIMEOUT_S = 300.0
SETUP_TIMEOUT_S = 1800.0
ENGINE_TIMEOUT_S = 1800.0
"""Loading hundreds of gigabytes from a shared file system is slow the first time."""


async def bring_up(plan: JobPlan, run: RunDir, log: EventLog, tell: Tell) -> RayFleet:
    """Bring everything up and watch over it. Faults go to ``tell`` as they are seen."""
    rewards = RewardPool(plan.spec.reward.custom_rm_path, plan.profile_dir, timeout_s=plan.spec.reward.timeout_s)
    # gather raises the first failure at once: a bad prompt is not to wait for the engines.
    _, prompts, roles = await asyncio.gather(
        asyncio.to_thread(rewards.check), asyncio.to_thread(_load_prompts, plan), _start_roles(plan, run, log, tell)
    )
    group = await _connect_weights(plan, roles.trainers, roles.clients)
    return RayFleet(plan, run, log, roles, group, prompts, rewards)


async def _start_roles(plan: JobPlan, run: RunDir, log: EventLog, tell: Tell) -> Roles:
    await _connect_ray(plan, run)
    trainers, engines = await _place_actors(plan)
    watchers = [asyncio.create_task(watch_actor(member, tell)) for member in (*trainers, *engines)]
    tensors, clients = await asyncio.gather(_set_up_trainers(trainers, log), _start_engines(plan, run, engines, log))
    for index, engine in enumerate(engines):
        log_path = str(run.attempt(plan.attempt).log(f"engine-{index}"))
        watchers.append(asyncio.create_task(watch_engine(engine, log_path, tell)))
    return Roles(trainers, engines, clients, tensors, watchers)


async def _connect_ray(plan: JobPlan, run: RunDir) -> None:
    attempt = run.attempt(plan.attempt)
    await until(HEAD_TIMEOUT_S, lambda: "the address of the Ray head", attempt.ray_head.exists)
    address = read_json(attempt.ray_head)["address"]
    await asyncio.to_thread(ray.init, address=address, log_to_driver=False, logging_level="error")
    wanted = {Role.TRAINER.value: plan.trainer_ranks, Role.ROLLOUT.value: plan.engines}

    def missing() -> dict[str, float]:
        have = ray.cluster_resources()
        return {role: count - have.get(role, 0) for role, count in wanted.items() if have.get(role, 0) < count}

    await until(RAYLETS_TIMEOUT_S, lambda: f"raylets with places {json.dumps(missing())}", lambda: not missing())
    say(f"Ray is up at {address}")


async def _place_actors(plan: JobPlan) -> tuple[list[Member], list[Member]]:
    plan_json = plan.model_dump_json()

    def place(cls: type, role: Role, index: int) -> Any:
        options = {"num_cpus": 0, "resources": {role.value: 1}, "max_restarts": 0}
        return ray.remote(cls).options(**options).remote(plan_json, index)

    trainers = [place(TrainerActor, Role.TRAINER, rank) for rank in range(plan.trainer_ranks)]
    engines = [place(EngineActor, Role.ROLLOUT, index) for index in range(plan.engines)]
    asked = (
        gather(Role.TRAINER, [a.node.remote() for a in trainers]),
        gather(Role.ROLLOUT, [a.node.remote() for a in engines]),
    )
    trainer_nodes, engine_nodes = await within(ACTORS_TIMEOUT_S, "the actors", asyncio.gather(*asked))
    return (
        [Member(actor, Role.TRAINER, trainer_nodes[i], f"trainer rank {i}") for i, actor in enumerate(trainers)],
        [Member(actor, Role.ROLLOUT, engine_nodes[i], f"engine {i}") for i, actor in enumerate(engines)],
    )


async def _set_up_trainers(trainers: list[Member], log: EventLog) -> list[TensorMeta]:
    host, port = (
        await within(ACTORS_TIMEOUT_S, "rank 0", gather(Role.TRAINER, [trainers[0].actor.rendezvous.remote()]))
    )[0]
    setups = [rank.actor.setup.remote(host, port) for rank in trainers]
    tensors: list[TensorMeta] = (await within(SETUP_TIMEOUT_S, "the trainer's set-up", gather(Role.TRAINER, setups)))[0]
    log("trainer_ready", ranks=len(trainers), nodes=sorted({rank.node for rank in trainers}))
    say(f"trainer is ready: {len(trainers)} rank(s)")
    return tensors


async def _start_engines(plan: JobPlan, run: RunDir, engines: list[Member], log: EventLog) -> list[EngineClient]:
    attempt = run.attempt(plan.attempt)
    started = await within(
        ACTORS_TIMEOUT_S, "the engines' processes", gather(Role.ROLLOUT, [e.actor.start.remote() for e in engines])
    )
    for engine, (url, pid) in zip(engines, started, strict=True):
        log("engine_started", engine=engine.name, node=engine.node, url=url, pid=pid)
    healthy = [engine.actor.wait_healthy.remote(ENGINE_TIMEOUT_S) for engine in engines]
    await within(ENGINE_TIMEOUT_S, "healthy engines", gather(Role.ROLLOUT, healthy))
    say(f"engines are healthy: {len(engines)}")
    for engine, (url, _) in zip(engines, started, strict=True):
        log("engine_healthy", engine=engine.name, node=engine.node, url=url)
    keys = EngineKeys.load(attempt.engine_keys)
    return [await EngineClient(url, keys).__aenter__() for url, _ in started]


def _load_prompts(plan: JobPlan) -> PromptSource:
    from transformers import AutoConfig, AutoTokenizer

    model, spec = plan.spec.model.hf_checkpoint, plan.spec
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    prompts = PromptSource(
        spec.data,
        AutoTokenizer.from_pretrained(model),
        max_tokens=context - spec.sampling.rollout_max_response_len,
    )
    say(f"{len(prompts)} prompts; {prompts.too_long} left out as too long")
    return prompts


async def _connect_weights(plan: JobPlan, trainers: Sequence[Member], clients: Sequence[EngineClient]) -> str:
    group = group_name(plan.attempt, membership=0)
    rank0 = trainers[0].actor
    host, port = (await gather(Role.TRAINER, [rank0.listen_for_engines.remote(SYNC_TIMEOUT_S)]))[0]

    async def join(world_size: int) -> None:
        await gather(Role.TRAINER, [rank0.join_engines.remote(world_size, group)])

    await connect(
        clients,
        join,
        host=host,
        port=port,
        ranks_per_engine=plan.spec.rollout.gpus_per_engine,
        group_name=group,
        backend=get_device(plan.cluster.device).backend,
        deadline_s=SYNC_TIMEOUT_S,
    )
    return group
