"""The trainer's way to the engines: a weight group that is formed anew, without those that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from slime_hpc.errors import ClusterError
from slime_hpc.types import TensorMeta, WeightReceiver, WeightVersion
from slime_hpc.weight_sync.transaction import WeightSyncError, connect, group_name, publish

ANSWER_TIMEOUT_S = 30.0
"""For an engine to leave a group that the trainer has closed: then it waits for nobody."""


class WeightSource(Protocol):
    """The trainer, as weight sync sees it (``WeightSender`` in trainer rank 0)."""

    async def listen(self) -> tuple[str, int]:
        """Host and port at which the engines of a new group meet it."""

    async def join(self, world_size: int, group_name: str) -> None: ...

    async def broadcast(self) -> None: ...

    async def close(self) -> None:
        """Leave the group; engines that wait in it get an error."""


class Membership(Protocol):
    """Who serves, and who is told of one that must not any more."""

    def serving(self) -> Sequence[WeightReceiver]:
        """ClusterError if none is left."""

    def drop(self, url: str, why: str) -> None:
        """It never serves again."""


class WeightChannel:
    """Publishes versions to all engines that serve. ``epoch`` counts the groups that were formed."""

    def __init__(
        self,
        source: WeightSource,
        engines: Membership,
        buckets: Sequence[Sequence[TensorMeta]],
        *,
        attempt: int,
        ranks_per_engine: int,
        backend: str,
        deadline_s: float,
    ) -> None:
        self._source = source
        self._engines = engines
        self._buckets = buckets
        self._attempt = attempt
        self._ranks_per_engine = ranks_per_engine
        self._backend = backend
        self._deadline_s = deadline_s
        self._members: tuple[str, ...] = ()
        self._is_open = False
        self.epoch = -1

    async def publish(self, version: WeightVersion) -> None:
        """Have every engine serve ``version``, or drop it.

        ClusterError if none is left; WeightSyncError if it fails twice although every engine answers.
        """
        is_second_try = False
        while True:
            engines = self._engines.serving()
            try:
                await self._connect(engines)
                await publish(
                    engines,
                    self._source.broadcast,
                    self._buckets,
                    version=version,
                    group_name=self._group,
                    deadline_s=self._deadline_s,
                )
            except WeightSyncError as error:
                lost = await self._find_lost(engines, error)
                if not lost and is_second_try:
                    lost = {url: str(error) for url in error.who if url in self._urls(engines)}
                    if not lost:
                        raise
                is_second_try = not lost
                for url, why in lost.items():
                    self._engines.drop(url, why)
            else:
                return

    async def _connect(self, engines: Sequence[WeightReceiver]) -> None:
        if self._members == self._urls(engines):
            return
        await self._leave(engines)
        self.epoch += 1
        self._is_open = True
        host, port = await self._source.listen()
        await connect(
            engines,
            lambda world_size: self._source.join(world_size, self._group),
            host=host,
            port=port,
            ranks_per_engine=self._ranks_per_engine,
            group_name=self._group,
            backend=self._backend,
            deadline_s=self._deadline_s,
        )
        self._members = self._urls(engines)

    async def _find_lost(self, engines: Sequence[WeightReceiver], error: WeightSyncError) -> dict[str, str]:
        """Address of every engine that cannot be kept, and why."""
        named = {} if error.is_shared else {url: str(error) for url in error.who}
        return {**await self._leave(engines), **named}

    async def _leave(self, engines: Sequence[WeightReceiver]) -> dict[str, str]:
        """Take the group apart, our side first, and say which engines do not answer even then."""
        if not self._is_open:
            return {}
        await self._source.close()
        self._is_open, self._members = False, ()
        problems = await asyncio.gather(*(self._abandon(engine) for engine in engines))
        return {url: problem for url, problem in zip(self._urls(engines), problems, strict=True) if problem}

    async def _abandon(self, engine: WeightReceiver) -> str:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await engine.abandon_weight_update(self._group)
        except TimeoutError:
            return f"engine {engine.url} did not leave the weight group within {ANSWER_TIMEOUT_S:g} s"
        except ClusterError as error:
            return str(error)  # handed on: it is the reason to drop the engine
        return ""

    @property
    def _group(self) -> str:
        return group_name(self._attempt, self.epoch)

    @staticmethod
    def _urls(engines: Sequence[WeightReceiver]) -> tuple[str, ...]:
        return tuple(engine.url for engine in engines)
