"""Which engine answers which request, and what becomes of requests whose engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.rollout.client import Completion, EngineError
from slime_hpc.rollout.data import Draw, Prompt
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.rollout.router import Router
from slime_hpc.spec.run import Sampling


class Engine:
    """Answers with its own name once it is let; or with an error."""

    def __init__(self, url: str, *, error: EngineError | None = None) -> None:
        self.url = url
        self.error = error
        self.asked: list[int] = []
        self.may_answer = asyncio.Event()

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion:
        self.asked.append(input_ids[0])
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return Completion(self.url, (1,), (-1.0,), "stop", "a1.v0")


def silent(url: str) -> EngineError:
    return EngineError(url, "/generate", "connection refused")


def make_router(*engines: Engine) -> tuple[Router, list[str]]:
    lost: list[str] = []
    return Router(engines, lambda error: lost.append(error.url)), lost


async def ask(router: Router, count: int) -> list[asyncio.Task[Completion]]:
    tasks = [asyncio.create_task(router.generate([i], {})) for i in range(count)]
    await asyncio.sleep(0.01)
    return tasks


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    async def run() -> None:
        a, b = Engine("a"), Engine("b")
        router, lost = make_router(a, b)
        first = await ask(router, 6)
        assert (len(a.asked), len(b.asked)) == (3, 3)
        a.may_answer.set()
        await asyncio.sleep(0.01)
        assert router.busy == ["b"]
        await ask(router, 3)
        assert len(a.asked) > 3 and len(b.asked) == 3, "a is idle, b is not"
        b.may_answer.set()
        assert sorted(done.text for done in await asyncio.gather(*first)) == ["a"] * 3 + ["b"] * 3
        assert lost == []

    asyncio.run(run())


def test_requests_of_a_removed_engine_go_to_the_others() -> None:
    async def run() -> None:
        a, b = Engine("a"), Engine("b")
        router, lost = make_router(a, b)
        tasks = await ask(router, 6)
        b.may_answer.set()
        router.remove("a")
        router.remove("a")
        assert [done.text for done in await asyncio.gather(*tasks)] == ["b"] * 6
        assert sorted(b.asked) == list(range(6))
        assert lost == [], "whoever removes it knows already"

    asyncio.run(run())


def test_an_engine_that_gives_no_answer_is_removed_and_told_of_once() -> None:
    async def run() -> None:
        a, b = Engine("a", error=silent("a")), Engine("b")
        router, lost = make_router(a, b)
        tasks = await ask(router, 6)
        a.may_answer.set()
        b.may_answer.set()
        assert {done.text for done in await asyncio.gather(*tasks)} == {"b"}
        assert lost == ["a"]

    asyncio.run(run())


def test_when_none_is_left_generation_fails() -> None:
    async def run() -> None:
        a = Engine("a", error=silent("a"))
        a.may_answer.set()
        router, lost = make_router(a)
        with pytest.raises(ClusterError, match="no engine is left"):
            await router.generate([1], {})
        assert lost == ["a"]

    asyncio.run(run())


def test_a_refusal_is_the_requests_fault_not_the_engines() -> None:
    async def run() -> None:
        a = Engine("a", error=EngineError("a", "/generate", "too long", status=400))
        a.may_answer.set()
        router, lost = make_router(a, Engine("b"))
        with pytest.raises(EngineError, match="too long"):
            await router.generate([1], {})
        assert lost == []

    asyncio.run(run())


def test_a_missed_deadline_names_the_engines_that_were_busy() -> None:
    async def run() -> None:
        a, b = Engine("a"), Engine("b")
        b.may_answer.set()
        router, _ = make_router(a, b)
        sampling = Sampling(rollout_batch_size=1, n_samples_per_prompt=4, rollout_max_response_len=1)
        with pytest.raises(DeadlineExceeded, match=r"\d of 4 samples were missing after 0 s, from a$"):
            await generate_groups(router, [Draw(0, Prompt("p", (1,), label=None))], sampling, deadline_s=0.1)
        assert router.busy == []

    asyncio.run(run())
