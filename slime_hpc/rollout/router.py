"""Which engines serve, and which of them gets the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slime_hpc.errors import ClusterError
from slime_hpc.rollout.client import Completion, EngineError

REQUESTS_PER_ENGINE = 256
"""In flight at once to one engine; it queues what it cannot run."""

T = TypeVar("T")


class Generator(Protocol):
    """What of an engine's client the router uses."""

    url: str

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion: ...


class EngineGone(ClusterError):
    """The engine was removed while it had our request."""


@dataclass(eq=False)
class _Lane:
    client: Generator
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS_PER_ENGINE))
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0
    """Under way or waiting at the gate."""

    async def ask(self, tokens: Sequence[int], params: Mapping[str, Any]) -> Completion:
        self.requests += 1
        try:
            async with self.gate:
                return await self._unless_gone(self.client.generate(tokens, params))
        finally:
            self.requests -= 1

    async def _unless_gone(self, request: Awaitable[T]) -> T:
        """A host that vanished answers nothing, so being told is what ends the waiting."""
        work = asyncio.ensure_future(request)
        told = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({work, told}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise EngineGone(f"engine {self.client.url} was removed")
        finally:
            work.cancel()
            told.cancel()


class Router:
    """Every request goes to the engine with the fewest, and on to another one if that engine is lost."""

    def __init__(self, clients: Sequence[Generator], on_silent: Callable[[EngineError], None]) -> None:
        """``on_silent(error)`` hears of an engine that was removed because it did not answer."""
        self._lanes = {client.url: _Lane(client) for client in clients}
        self._on_silent = on_silent

    def remove(self, url: str) -> None:
        """Send it nothing more; what it was working on goes to the others. Nothing happens if it is not here."""
        lane = self._lanes.pop(url, None)
        if lane is not None:
            lane.gone.set()

    @property
    def busy(self) -> list[str]:
        """Addresses of the engines that have requests."""
        return sorted(url for url, lane in self._lanes.items() if lane.requests)

    async def generate(self, tokens: Sequence[int], params: Mapping[str, Any]) -> Completion:
        """ClusterError if no engine is left; EngineError if one refuses, as the others would."""
        while True:
            lane = self._least_busy()
            try:
                return await lane.ask(tokens, params)
            except EngineGone:
                continue  # another one makes it from the start
            except EngineError as error:
                if not error.is_transient:
                    raise
                self._give_up(lane, error)

    def _least_busy(self) -> _Lane:
        if not self._lanes:
            raise ClusterError("no engine is left to generate with")
        return min(self._lanes.values(), key=lambda lane: lane.requests)

    def _give_up(self, lane: _Lane, error: EngineError) -> None:
        if self._lanes.get(lane.client.url) is lane:
            self.remove(lane.client.url)
            self._on_silent(error)
