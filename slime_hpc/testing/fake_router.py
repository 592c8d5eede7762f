"""sglang-router in memory, with the policy that slime-hpc sets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from slime_hpc.rollout.client import Completion, EngineError, RouterError

Generate = Callable[[Sequence[int]], Awaitable[Completion]]
"""What an engine makes of a prompt. EngineError without a status: its connection broke."""


class FakeRouter:
    """Implements ``rollout.router.RouterApi``; ``engines`` are all that can be added, by address."""

    url = "http://router"

    def __init__(self, engines: Mapping[str, Generate]) -> None:
        self._engines = engines
        self._requests: dict[str, int] = {}

    async def add_engine(self, url: str) -> None:
        self._requests[url] = 0

    async def remove_engine(self, url: str) -> None:
        self._requests.pop(url, None)

    async def requests(self) -> dict[str, int]:
        return dict(self._requests)

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion:
        if not self._requests:
            raise RouterError(self.url, "/generate", "no_available_workers", status=503)
        url = min(self._requests, key=self._requests.__getitem__)
        self._count(url, 1)
        try:
            return await self._engines[url](input_ids)
        except EngineError as error:
            if error.status is None:
                raise RouterError(self.url, "/generate", str(error), status=500) from error
            raise EngineError(self.url, "/generate", str(error), status=error.status) from error
        finally:
            self._count(url, -1)

    def _count(self, url: str, change: int) -> None:
        if url in self._requests:
            self._requests[url] += change
