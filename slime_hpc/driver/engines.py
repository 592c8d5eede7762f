"""The engines of an attempt: who of them serves, and what the loss of one means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_hpc.driver.deadline import say
from slime_hpc.driver.health import Evidence, Fault, Member, Tell
from slime_hpc.errors import ClusterError
from slime_hpc.records import EventLog
from slime_hpc.rollout.client import EngineClient, EngineError
from slime_hpc.rollout.router import Router, RouterApi
from slime_hpc.supervisor.cause import Cause, Ending


@dataclass(frozen=True)
class Engine:
    """The actor that holds a server, and the way to talk to it."""

    member: Member
    client: EngineClient


class Engines:
    """A lost engine is dropped for good while others are left; the loss of the last one is the attempt's fault.

    So is any loss before ``admit``, since then nothing has worked yet. Belongs to the event loop it is made in;
    other threads may call ``report`` only.
    """

    def __init__(self, tell: Tell, log: EventLog, kill: Callable[[Member], None]) -> None:
        self._tell = tell
        self._log = log
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._serving: dict[str, Engine] = {}
        self._clients: list[EngineClient] = []
        self._router: Router | None = None

    async def admit(self, engines: Sequence[Engine], api: RouterApi) -> None:
        """These are up, and the router is to have them."""
        clients = [engine.client for engine in engines]
        router = Router(api, self._on_silent)
        await router.admit(clients)
        self._serving = {engine.client.url: engine for engine in engines}
        self._clients, self._router = clients, router

    @property
    def router(self) -> Router:
        """For generation; has every engine that serves."""
        if self._router is None:
            raise RuntimeError("no engines were admitted")
        return self._router

    @property
    def members(self) -> list[Member]:
        return [engine.member for engine in self._serving.values()]

    def serving(self) -> list[EngineClient]:
        if not self._serving:
            raise ClusterError("no engine is left")
        return [engine.client for engine in self._serving.values()]

    def drop(self, url: str, why: str) -> None:
        """Because of what it did or failed to do. Nothing happens if it was dropped before."""
        if url in self._serving:
            member = self._serving[url].member
            self.lose(Fault(Evidence.LOOP, Ending(Cause.CRASHED, why, member.role, member.node), member.name))

    def lose(self, fault: Fault) -> None:
        """Somebody saw one engine end, or the node of several."""
        lost = [engine for engine in self._serving.values() if fault.concerns(engine.member)]
        for engine in lost:
            del self._serving[engine.client.url]
            self.router.remove(engine.client.url, has_ended=fault.evidence is Evidence.PROCESS)
            self._kill(engine.member)  # it may be silent and alive, and must not come back
        for engine in lost:
            name, node, left = engine.member.name, engine.member.node, len(self._serving)
            self._log("engine_dropped", engine=name, node=node, detail=fault.ending.detail, left=left)
            say(f"{name} on {node} is dropped, {left} left: {fault.ending.detail}")
        if not self._serving:
            self._tell(fault)

    def report(self, fault: Fault) -> None:
        """``lose``, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.lose, fault)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.__aexit__(None, None, None)

    def _on_silent(self, error: EngineError) -> None:
        self.drop(error.url, str(error))
