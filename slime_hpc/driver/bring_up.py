"""From an empty Ray cluster to a fleet: raylets, actors, engines, weight group. What can load at once does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import ray

from slime_hpc.checkpoint import Checkpoint
from slime_hpc.device import get_device
from slime_hpc.driver.actors import EngineActor, TrainerActor, gather
from slime_hpc.driver.deadline import say, until, within
from slime_hpc.driver.engines import Engine, Engines
from slime_hpc.driver.fleet import SYNC_TIMEOUT_S, RayFleet, TrainerWeights, all_ranks
from slime_hpc.driver.health import Member, Tell, watch_actor, watch_engine, watch_router
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog, read_json
from slime_hpc.rewards.pool import RewardPool
from slime_hpc.rollout.client import EngineClient, EngineKeys, RouterClient
from slime_hpc.rollout.data import PromptSet, PromptSource, load_prompts
from slime_hpc.rollout.engine import engine_args, prompt_room
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.run import Data, Sampling
from slime_hpc.types import Role, TensorMeta, WeightVersion
from slime_hpc.weight_sync.buckets import buckets
from slime_hpc.weight_sync.channel import WeightChannel

HEAD_TIMEOUT_S = 300.0
RAYLETS_TIMEOUT_S = 300.0
ACTORS_TIMEOUT_S = 300.0
SETUP_TIMEOUT_S = 1800.0
ENGINE_TIMEOUT_S = 1800.0
"""Loading hundreds of gigabytes from a shared file system is slow the first time."""


async def bring_up(
    plan: JobPlan, run: RunDir, log: EventLog, tell: Tell, engines: Engines, start: Checkpoint | None
) -> RayFleet:
    """Bring everything up, as it was at ``start``, and watch over it.

    Faults go to ``tell`` as they are seen, an engine's to ``engines``.
    """
    rewards = RewardPool(plan.spec.reward, plan.profile_dir)
    # gather raises the first failure at once: a bad prompt is not to wait for the engines.
    router = RouterServer(plan)
    _, (prompts, eval_prompts), (trainers, weights, watchers) = await asyncio.gather(
        asyncio.to_thread(rewards.check),
        asyncio.to_thread(_load_prompts, plan, start),
        _start_roles(plan, run, log, tell, engines, router, start),
    )
    for name, loaded in (("training data", prompts.set), *eval_prompts.items()):
        _report_prompts(log, name, loaded)
    fleet = RayFleet(plan, run, log, trainers, engines, router, weights, prompts, eval_prompts, rewards, watchers)
    if start is not None:
        fleet.published = WeightVersion.parse(start.manifest.weight_version).number - 1
    return fleet


async def _start_roles(
    plan: JobPlan,
    run: RunDir,
    log: EventLog,
    tell: Tell,
    engines: Engines,
    router: RouterServer,
    start: Checkpoint | None,
) -> tuple[list[Member], WeightChannel, list[asyncio.Task[None]]]:
    """Trainer ranks and engines, loaded side by side, and who watches over them."""
    router_api = await _start_router(router, log)
    await _connect_ray(plan, run)
    trainers, holders = await _place_actors(plan, run)
    watchers = [
        asyncio.create_task(watch_router(router, tell)),
        *(asyncio.create_task(watch_actor(member, tell)) for member in trainers),
        *(asyncio.create_task(watch_actor(member, engines.lose)) for member in holders),
    ]
    tensors, started = await asyncio.gather(
        _set_up_trainers(trainers, log, start), _start_engines(plan, run, holders, log)
    )
    for index, member in enumerate(holders):
        log_path = str(run.attempt(plan.attempt).log(f"engine-{index}"))
        watchers.append(asyncio.create_task(watch_engine(member, log_path, engines.lose)))
    await engines.admit(started, router_api)
    return trainers, _weight_channel(plan, trainers, engines, tensors), watchers


async def _start_router(router: RouterServer, log: EventLog) -> RouterClient:
    router.start()
    client = await router.client().__aenter__()
    await router.wait_ready(client)
    log("router_started", url=router.url, pid=router.pid)
    return client


async def _connect_ray(plan: JobPlan, run: RunDir) -> None:
    attempt = run.attempt(plan.attempt)
    head = attempt.node(read_json(attempt.allocation)[Role.TRAINER][0])
    await until(HEAD_TIMEOUT_S, lambda: "the Ray head", head.exists)
    address = read_json(attempt.ray_head)["address"]
    await asyncio.to_thread(ray.init, address=address, log_to_driver=False, logging_level="error")
    wanted = {Role.TRAINER.value: plan.trainer_ranks, Role.ROLLOUT.value: plan.engines}

    def missing() -> dict[str, float]:
        have = ray.cluster_resources()
        return {role: count - have.get(role, 0) for role, count in wanted.items() if have.get(role, 0) < count}

    await until(RAYLETS_TIMEOUT_S, lambda: f"raylets with places {json.dumps(missing())}", lambda: not missing())
    say(f"Ray is up at {address}")


async def _place_actors(plan: JobPlan, run: RunDir) -> tuple[list[Member], list[Member]]:
    """Neighbouring ranks, and engines by the number their GPUs follow from, on the same node."""
    nodes: dict[str, list[str]] = read_json(run.attempt(plan.attempt).allocation)
    hosts = await _hosts(plan, run, [name for names in nodes.values() for name in names])
    plan_json = plan.model_dump_json()

    def place(cls: type, role: Role, index: int, node: str, name: str) -> Member:
        resources = {role.value: 1, f"node:{hosts[node]}": 0.001}
        actor = ray.remote(cls).options(num_cpus=0, resources=resources, max_restarts=0).remote(plan_json, index)
        return Member(actor, role, node, name)

    trainers = [
        place(TrainerActor, Role.TRAINER, rank, nodes[Role.TRAINER][rank // plan.trainer.processes_per_node], name)
        for rank, name in ((rank, f"trainer rank {rank}") for rank in range(plan.trainer_ranks))
    ]
    engines = [
        place(EngineActor, Role.ROLLOUT, index, nodes[Role.ROLLOUT][index // plan.engines_per_node], f"engine {index}")
        for index in range(plan.engines)
    ]
    up = (
        gather(Role.TRAINER, [member.actor.ping.remote() for member in trainers]),
        gather(Role.ROLLOUT, [member.actor.ping.remote() for member in engines]),
    )
    await within(ACTORS_TIMEOUT_S, "the actors", asyncio.gather(*up))
    return trainers, engines


async def _hosts(plan: JobPlan, run: RunDir, nodes: Sequence[str]) -> dict[str, str]:
    """Address of each node, by which Ray knows it too."""
    files = {node: run.attempt(plan.attempt).node(node) for node in nodes}

    def missing() -> list[str]:
        return [node for node, file in files.items() if not file.exists()]

    await until(RAYLETS_TIMEOUT_S, lambda: f"the agents of {', '.join(missing())}", lambda: not missing())
    return {node: str(read_json(file)["host"]) for node, file in files.items()}


async def _set_up_trainers(trainers: list[Member], log: EventLog, start: Checkpoint | None) -> list[TensorMeta]:
    host, port = (
        await within(ACTORS_TIMEOUT_S, "rank 0", gather(Role.TRAINER, [trainers[0].actor.rendezvous.remote()]))
    )[0]
    setups = [rank.actor.setup.remote(host, port) for rank in trainers]
    tensors: list[TensorMeta] = (await within(SETUP_TIMEOUT_S, "the trainer's set-up", gather(Role.TRAINER, setups)))[0]
    if start is not None:
        await all_ranks(trainers, "load", SETUP_TIMEOUT_S, start.path)
        say(f"trainer goes on from {start.path.name}")
    log("trainer_ready", ranks=len(trainers), nodes=sorted({rank.node for rank in trainers}))
    say(f"trainer is ready: {len(trainers)} rank(s)")
    return tensors


async def _start_engines(plan: JobPlan, run: RunDir, engines: list[Member], log: EventLog) -> list[Engine]:
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
    clients = [await EngineClient(url, keys).__aenter__() for url, _ in started]
    return [Engine(member, client) for member, client in zip(engines, clients, strict=True)]


def _load_prompts(plan: JobPlan, start: Checkpoint | None) -> tuple[PromptSource, dict[str, PromptSet]]:
    """The training data, with its cursor where it was at ``start``, and the evaluation sets by name."""
    from transformers import AutoConfig, AutoTokenizer

    model, spec = plan.spec.model.hf_checkpoint, plan.spec
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = engine_args(plan, 0, host="", port=0)

    def load(data: Data, sampling: Sampling) -> PromptSet:
        room = prompt_room(args, context, sampling.rollout_max_response_len)
        return load_prompts(data, tokenizer, max_tokens=room, rm_type=spec.reward.rm_type)

    training = load(spec.data, spec.sampling)
    eval_sets = {
        s.name: load(s.as_data(spec.data), s.as_sampling(spec.sampling)).compared_with(training, held_out=s.held_out)
        for s in spec.eval.sets
    }
    prompts = PromptSource(training, spec.data)
    if start is not None:
        prompts.restore(start.manifest.data)
    return prompts, eval_sets


def _report_prompts(log: EventLog, name: str, prompts: PromptSet) -> None:
    counts = {"prompts": len(prompts), "too_long": prompts.too_long, "also_in_training": prompts.trained}
    log("prompts_loaded", set=name, source=prompts.source, **counts)
    say(f"{name}: {len(prompts)} prompts; {prompts.too_long} left out as too long")


def _weight_channel(
    plan: JobPlan, trainers: list[Member], engines: Engines, tensors: list[TensorMeta]
) -> WeightChannel:
    return WeightChannel(
        TrainerWeights(trainers),
        engines,
        list(buckets(tensors, plan.spec.rollout.update_weight_buffer_size)),
        attempt=plan.attempt,
        ranks_per_engine=plan.spec.rollout.gpus_per_engine,
        backend=get_device(plan.cluster.device).backend,
        deadline_s=SYNC_TIMEOUT_S,
    )
