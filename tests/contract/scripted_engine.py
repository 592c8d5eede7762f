"""An engine that does what a test wants, behind the fake router and, by HTTP, behind the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from slime_hpc.rollout.client import Completion, EngineError


class ScriptedEngine:
    """Answers with its own name once it is let; or refuses, or crashes, or vanishes."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        self.name = name
        self.url = f"http://{name}"
        self.refuses = refuses
        self.asked: list[int] = []
        self.may_answer = asyncio.Event()
        self._has_crashed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def require_answer(self) -> None:
        if self._has_crashed.is_set():
            raise self._silence()

    async def generate(self, input_ids: Sequence[int]) -> Completion:
        if self._has_crashed.is_set():
            raise self._silence()
        self.asked.append(input_ids[0])
        waits = [asyncio.ensure_future(event.wait()) for event in (self.may_answer, self._has_crashed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._has_crashed.is_set():
            raise self._silence()
        if self.refuses:
            raise EngineError(self.url, "/generate", "too long", status=400)
        return Completion(self.name, (7, input_ids[0]), (-0.5, -1.25), "length", "a1.v3")

    async def crash(self) -> None:
        """Its host is well, so connections break and new ones are refused."""
        self._has_crashed.set()
        if self._runner is not None:
            await self.stop()

    def _silence(self) -> EngineError:
        return EngineError(self.url, "/generate", "connection refused")

    async def listen(self) -> None:
        """Serve what sglang-router asks an engine."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/{path:health|server_info|model_info}", self._describe)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/nowhere", "served_model_name": "scripted", "tp_size": 1})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            done = await self.generate(body["input_ids"])
        except EngineError as error:
            if error.status is None:
                assert request.transport is not None
                request.transport.abort()
            return web.Response(text=str(error), status=error.status or 500)
        scored = [[log_prob, token, None] for log_prob, token in zip(done.log_probs, done.tokens, strict=True)]
        meta: dict[str, Any] = {"output_token_logprobs": scored, "weight_version": done.weight_version}
        return web.json_response({"text": done.text, "meta_info": {**meta, "finish_reason": {"type": "length"}}})
