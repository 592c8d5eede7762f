"""Who is lost, and why: evidence from several sides, the best of which names the culprit."""

from __future__ import annotations

import asyncio
import enum
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayError

from slime_hpc.driver.actors import ActorFailed
from slime_hpc.driver.deadline import say
from slime_hpc.errors import SlimeHpcError, UserError
from slime_hpc.rollout.client import EngineError, RouterError
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.supervisor.address import node_name
from slime_hpc.supervisor.cause import Cause, Ending, describe_exit
from slime_hpc.types import Role
from slime_hpc.weight_sync.transaction import WeightSyncError

POLL_S = 0.5


class Evidence(enum.IntEnum):
    """How near to the death a witness stood; a lower one explains the higher ones away."""

    AGENT = 0
    """The agent of the node saw its raylet end."""
    PROCESS = 1
    """An actor saw its engine end, or the driver its router."""
    ACTOR = 2
    """Ray says that an actor is gone."""
    LOOP = 3
    """A step of the loop failed."""


@dataclass(frozen=True)
class Fault:
    """One account of what went wrong."""

    evidence: Evidence
    ending: Ending
    member: str | None = None
    """Whom it concerns; None: everybody of that role on that node."""

    def concerns(self, member: Member) -> bool:
        if self.member is not None:
            return self.member == member.name
        return (self.ending.role, self.ending.node) == (member.role, member.node)


Tell = Callable[[Fault], None]


@dataclass(frozen=True)
class Member:
    """One actor and what it is for."""

    actor: Any
    role: Role
    node: str
    name: str
    """``trainer rank 0``, ``engine 0``."""


async def watch_actor(member: Member, tell: Tell) -> None:
    """One ping is always under way: it waits its turn behind work, and fails as soon as the actor is gone."""
    while True:
        try:
            await asyncio.wrap_future(member.actor.ping.remote().future())
        except RayError as error:
            detail = f"{member.name} on {member.node} is gone ({type(error).__name__})"
            return tell(Fault(Evidence.ACTOR, Ending(Cause.CRASHED, detail, member.role, member.node), member.name))
        await asyncio.sleep(POLL_S)


async def watch_engine(member: Member, log: str, tell: Tell) -> None:
    """Ask the engine's actor for the exit status of its server."""
    while True:
        try:
            status = await asyncio.wrap_future(member.actor.poll.remote().future())
        except RayError:
            return None  # the actor itself is gone, which watch_actor reports
        if status is not None:
            detail = f"{member.name} on {member.node} ended with {describe_exit(status)}; see {log}"
            return tell(Fault(Evidence.PROCESS, Ending(Cause.CRASHED, detail, member.role, member.node), member.name))
        await asyncio.sleep(POLL_S)


async def watch_router(router: RouterServer, tell: Tell) -> None:
    """Without it no engine can be asked, so its end is the attempt's."""
    while True:
        if (status := router.poll()) is not None:
            detail = f"the router, a child of the driver, ended with {describe_exit(status)}; see {router.log}"
            return tell(Fault(Evidence.PROCESS, Ending(Cause.CRASHED, detail, Role.DRIVER, node_name()), "router"))
        await asyncio.sleep(POLL_S)


def fault_of_loop(error: BaseException) -> Fault:
    """What the loop's own exception says, for when no better witness speaks up."""
    say("".join(traceback.format_exception(error)))
    if isinstance(error, UserError):
        return Fault(Evidence.LOOP, Ending(Cause.MISCONFIGURED, str(error)))
    role = _role_of(error)
    said = str(error).strip().splitlines() or ["no message"]
    detail = said[0] if isinstance(error, SlimeHpcError) else f"{type(error).__name__}: {said[-1]}"
    return Fault(Evidence.LOOP, Ending(Cause.CRASHED, detail, role))


def _role_of(error: BaseException) -> Role | None:
    if isinstance(error, ActorFailed):
        return error.role
    if isinstance(error, EngineError):
        return Role.DRIVER if isinstance(error, RouterError) else Role.ROLLOUT
    if isinstance(error, WeightSyncError | RayActorError):
        return None  # both sides take part; only a witness could tell
    return None if isinstance(error, SlimeHpcError) else Role.DRIVER
