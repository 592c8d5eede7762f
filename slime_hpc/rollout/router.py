"""Requests through the router, and what becomes of them when an engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from slime_hpc.errors import ClusterError
from slime_hpc.rollout.client import ATTEMPTS, Completion, EngineError

REQUESTS_PER_ENGINE = 256
"""In flight at once, on average over the engines; an engine queues what it cannot run."""

T = TypeVar("T")


class RouterApi(Protocol):
    """What of the router's client is used here (``client.RouterClient``)."""

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion: ...

    async def add_engine(self, url: str) -> None: ...

    async def remove_engine(self, url: str) -> None: ...

    async def requests(self) -> dict[str, int]: ...


class Answering(Protocol):
    """What of an engine's client is used here."""

    url: str

    async def require_answer(self) -> None:
        """EngineError if it is silent."""


class _Withdrawn(ClusterError):
    """An engine was removed, and it may have had this request."""


class Router:
    """The engines that serve, behind one address. Nothing asked of it is lost while one of them is left.

    The router does not say which engine has a request. So a request that failed is made again by whichever engine the
    router chooses then. And when an engine is removed that may hold requests in silence for good, as one whose host
    vanished does, all requests are withdrawn and made again.
    """

    def __init__(self, api: RouterApi, on_silent: Callable[[EngineError], None]) -> None:
        """``on_silent(error)`` hears of an engine that was removed because it did not answer."""
        self._api = api
        self._on_silent = on_silent
        self._engines: dict[str, Answering] = {}
        self._gate = asyncio.Semaphore(REQUESTS_PER_ENGINE)
        self._withdrawn = asyncio.Event()
        self._removals = 0
        self._removal: asyncio.Task[None] | None = None
        self._question: asyncio.Task[None] | None = None

    async def admit(self, engines: Sequence[Answering]) -> None:
        """Returns when the router has all of them. To be called once."""
        await asyncio.gather(*(self._api.add_engine(engine.url) for engine in engines))
        self._engines = {engine.url: engine for engine in engines}
        self._gate = asyncio.Semaphore(REQUESTS_PER_ENGINE * len(engines))

    def remove(self, url: str, *, has_ended: bool = False) -> None:
        """Send it nothing more. Nothing happens if it is not here.

        ``has_ended``: its process was seen to end, so its host closes its connections, and requests fail by themselves.
        """
        if self._engines.pop(url, None) is None:
            return
        self._removals += 1
        self._removal = asyncio.ensure_future(self._take_out(url, self._removal))
        if not has_ended:
            self._withdrawn.set()
            self._withdrawn = asyncio.Event()

    async def busy(self) -> list[str]:
        """Addresses of the engines that have requests, as far as the router counts them."""
        return sorted(url for url, count in (await self._api.requests()).items() if count)

    async def generate(self, tokens: Sequence[int], params: Mapping[str, Any]) -> Completion:
        """ClusterError if no engine is left; EngineError if one refuses, as the others would."""
        async with self._gate:
            failures = 0
            while True:
                await self._until_removed()
                removals = self._removals
                try:
                    return await self._unless_withdrawn(self._api.generate(tokens, params))
                except _Withdrawn:
                    continue  # it is made from the start
                except EngineError as error:
                    if not error.is_transient:
                        raise
                    await self._find_silent()
                    failures = failures + 1 if self._removals == removals else 0
                    if failures == ATTEMPTS:
                        raise  # engines answer, and yet it fails

    async def _take_out(self, url: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await self._api.remove_engine(url)

    async def _until_removed(self) -> None:
        """The router must not give a request to an engine that is gone. ClusterError if it cannot let go of it."""
        while (removal := self._removal) is not None:
            await asyncio.shield(removal)
            if removal is self._removal:
                break
        if not self._engines:
            raise ClusterError("no engine is left to generate with")

    async def _unless_withdrawn(self, request: Awaitable[T]) -> T:
        """A host that vanished answers nothing, so being told is what ends the waiting."""
        work = asyncio.ensure_future(request)
        told = asyncio.ensure_future(self._withdrawn.wait())
        try:
            await asyncio.wait({work, told}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise _Withdrawn("an engine was removed")
        finally:
            work.cancel()  # closes the connection, upon which the engine stops working on it
            told.cancel()

    async def _find_silent(self) -> None:
        """Remove whoever does not answer. Requests that failed together ask together."""
        if self._question is None or self._question.done():
            self._question = asyncio.ensure_future(self._ask_engines())
        await asyncio.shield(self._question)

    async def _ask_engines(self) -> None:
        await asyncio.gather(*(self._ask(engine) for engine in list(self._engines.values())))

    async def _ask(self, engine: Answering) -> None:
        try:
            await engine.require_answer()
        except EngineError as error:
            if engine.url in self._engines:
                self.remove(engine.url)
                self._on_silent(error)
