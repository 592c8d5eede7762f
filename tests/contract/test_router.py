"""Which engine answers which request, and what becomes of requests whose engine is lost: fake router and real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.plan import JobPlan
from slime_hpc.rollout.client import Completion, EngineClient, EngineError, EngineKeys, RouterClient, RouterError
from slime_hpc.rollout.data import Draw, Prompt
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.rollout.router import Router
from slime_hpc.rollout.router_server import RouterServer
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.run import Sampling
from slime_hpc.testing.fake_router import FakeRouter

KEYS = EngineKeys("user-key-77aa", "admin-key-77bb")


class Rig:
    """Engines a and b behind a router, and which of them were told to be silent."""

    def __init__(self, router: Router, a: ScriptedEngine, b: ScriptedEngine, lost: list[str]) -> None:
        self.router, self.a, self.b, self.lost = router, a, b, lost

    async def ask(self, count: int) -> list[asyncio.Task[Completion]]:
        """Started, and with the engines."""
        before = len(self.a.asked) + len(self.b.asked)
        tasks = [asyncio.create_task(self.router.generate([i], {"max_new_tokens": 2})) for i in range(count)]
        await self.until(lambda: len(self.a.asked) + len(self.b.asked) >= before + count)
        return tasks

    @staticmethod
    async def until(happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not happened():  # noqa: ASYNC110 - other processes take part
                await asyncio.sleep(0.01)


Test = Callable[[Rig], Awaitable[None]]
Run = Callable[..., None]


@asynccontextmanager
async def fake_rig(a: ScriptedEngine, b: ScriptedEngine, _: Path) -> AsyncIterator[Rig]:
    lost: list[str] = []
    router = Router(FakeRouter({e.url: e.generate for e in (a, b)}), lambda error: lost.append(error.url))
    await router.admit([a, b])
    yield Rig(router, a, b, lost)


@asynccontextmanager
async def real_rig(a: ScriptedEngine, b: ScriptedEngine, directory: Path) -> AsyncIterator[Rig]:
    lost: list[str] = []
    server = start_server(directory)
    try:
        await asyncio.gather(a.listen(), b.listen())
        async with server.client() as api, EngineClient(a.url, KEYS) as to_a, EngineClient(b.url, KEYS) as to_b:
            await server.wait_ready(api)
            router = Router(api, lambda error: lost.append(error.url))
            await router.admit([to_a, to_b])
            yield Rig(router, a, b, lost)
    finally:
        server.kill()
        await asyncio.gather(a.stop(), b.stop())


def start_server(directory: Path, **router: Any) -> RouterServer:
    attempt = RunDir(directory).attempt(1)
    attempt.secrets.mkdir(parents=True)
    attempt.engine_keys.write_text(json.dumps({"api_key": KEYS.api_key, "admin_api_key": KEYS.admin_api_key}))
    server = RouterServer(make_plan(directory, router))
    server.start()
    return server


def make_plan(directory: Path, router: dict[str, Any]) -> JobPlan:
    def component(index: int, role: str) -> dict[str, Any]:
        size = {"nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1}
        return {"index": index, "role": role, "partition": role, "time_limit_s": 600, "options": {}, **size}

    spec = {
        "name": "tiny",
        "cluster": "devcluster",
        "run_dir": directory,
        "time_limit": 10,
        "num_rollout": 1,
        "model": {"hf_checkpoint": "/models/tiny"},
        "trainer": {"partition": "trainer"},
        "rollout": {"partition": "rollout", "router": router},
        "data": {"prompt_data": "/data/p.jsonl"},
        "sampling": {"rollout_batch_size": 1, "rollout_max_response_len": 8},
        "reward": {"custom_rm_path": "m.f"},
    }
    return JobPlan.model_validate(
        {
            "tool_version": "0",
            "token": "t",
            "attempt": 1,
            "run_dir": directory,
            "profile_dir": "/p",
            "python": "python",
            "engine_python": "python",
            "setup": [],
            "components": [component(0, "trainer"), component(1, "rollout")],
            "spec": spec,
            "cluster": {"name": "devcluster", "device": "cpu"},
        }
    )


@pytest.fixture(params=[fake_rig, real_rig], ids=["fake", "real"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    def run(test: Test, **options: bool) -> None:
        async def main() -> None:
            async with request.param(ScriptedEngine("a", **options), ScriptedEngine("b"), tmp_path) as rig:
                await test(rig)

        asyncio.run(main())

    return run


def test_requests_go_to_the_engine_with_the_fewest(run: Run) -> None:
    async def test(rig: Rig) -> None:
        first = await rig.ask(6)
        assert (len(rig.a.asked), len(rig.b.asked)) == (3, 3)
        assert await rig.router.busy() == sorted([rig.a.url, rig.b.url])
        rig.a.may_answer.set()
        await rig.until(lambda: sum(task.done() for task in first) == 3)
        assert await rig.router.busy() == [rig.b.url]
        await rig.ask(3)
        assert (len(rig.a.asked), len(rig.b.asked)) == (6, 3), "a is idle, b is not"
        rig.b.may_answer.set()
        assert sorted(done.text for done in await asyncio.gather(*first)) == ["a"] * 3 + ["b"] * 3
        assert rig.lost == []

    run(test)


def test_an_answer_passes_through_whole(run: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.a.may_answer.set()
        rig.b.may_answer.set()
        done = await rig.router.generate([42], {"max_new_tokens": 2})
        assert done in [Completion(name, (7, 42), (-0.5, -1.25), "length", "a1.v3") for name in "ab"]

    run(test)


def test_all_requests_are_made_again_when_an_engine_is_removed_that_may_be_silent(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = await rig.ask(6)
        rig.b.may_answer.set()
        await rig.until(lambda: sum(task.done() for task in tasks) == 3)
        rig.b.may_answer.clear()
        rig.router.remove(rig.a.url)
        rig.router.remove(rig.a.url)
        await rig.until(lambda: len(rig.b.asked) == 6)
        rig.b.may_answer.set()
        assert [done.text for done in await asyncio.gather(*tasks)] == ["b"] * 6
        assert sorted(rig.b.asked) == list(range(6)), "an answer that was there is kept"
        assert len(rig.a.asked) == 3
        assert rig.lost == [], "whoever removes it knows already"

    run(test)


def test_requests_of_others_go_on_when_an_engine_was_seen_to_end(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = await rig.ask(6)
        kept = list(rig.b.asked)
        rig.router.remove(rig.a.url, has_ended=True)
        await rig.a.crash()
        await rig.until(lambda: len(rig.b.asked) == 6)
        rig.b.may_answer.set()
        assert [done.text for done in await asyncio.gather(*tasks)] == ["b"] * 6
        assert sorted(rig.b.asked) == list(range(6)) and rig.b.asked[:3] == kept
        assert rig.lost == []

    run(test)


def test_an_engine_that_gives_no_answer_is_removed_and_told_of_once(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = await rig.ask(6)
        await rig.a.crash()
        rig.b.may_answer.set()
        assert {done.text for done in await asyncio.gather(*tasks)} == {"b"}
        assert rig.lost == [rig.a.url]

    run(test)


def test_when_none_is_left_generation_fails(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = await rig.ask(2)
        await asyncio.gather(rig.a.crash(), rig.b.crash())
        failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(failure) for failure in failures] == ["no engine is left to generate with"] * 2
        assert sorted(rig.lost) == sorted([rig.a.url, rig.b.url])
        with pytest.raises(ClusterError, match="no engine is left"):
            await rig.router.generate([1], {})

    run(test)


def test_a_refusal_is_the_requests_fault_not_the_engines(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = await rig.ask(2)
        rig.a.may_answer.set()
        rig.b.may_answer.set()
        (refused,) = [f for f in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(f, EngineError)]
        assert "too long" in str(refused) and refused.status == 400 and not isinstance(refused, RouterError)
        assert rig.lost == []

    run(test, refuses=True)


def test_a_missed_deadline_names_the_engines_that_were_busy(run: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.b.may_answer.set()
        sampling = Sampling(rollout_batch_size=1, n_samples_per_prompt=4, rollout_max_response_len=1)
        with pytest.raises(DeadlineExceeded, match=rf"2 of 4 samples were missing after 0 s, from {rig.a.url}$"):
            await generate_groups(rig.router, [Draw(0, Prompt("p", (1,), label=None))], sampling, deadline_s=0.4)
        async with asyncio.timeout(5):
            while await rig.router.busy():  # noqa: ASYNC110 - another process takes part
                await asyncio.sleep(0.01)

    run(test)


def test_a_dead_router_gives_no_answer_and_no_engine_is_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        server = start_server(tmp_path)
        engine = ScriptedEngine("a")
        lost: list[str] = []
        async with server.client() as api:
            await server.wait_ready(api)
            await engine.listen()
            async with EngineClient(engine.url, KEYS) as client:
                router = Router(api, lambda error: lost.append(error.url))
                await router.admit([client])
                task = asyncio.create_task(router.generate([1], {}))
                await Rig.until(lambda: engine.asked == [1])
                server.kill()
                with pytest.raises(RouterError, match=f"router {server.url} gave no answer to /generate"):
                    await task
            await engine.stop()
        assert lost == []

    asyncio.run(main())


def test_a_router_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        server = start_server(tmp_path, polcy="random")
        async with server.client() as api:
            with pytest.raises(ClusterError, match=r"(?s)the router ended with exit status 1 .*polcy"):
                await server.wait_ready(api)

    asyncio.run(main())


@pytest.mark.parametrize("key", ["", "user-key-0000", KEYS.admin_api_key])
def test_it_does_nothing_without_the_key(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        server = start_server(tmp_path)
        try:
            async with RouterClient(server.url, EngineKeys(key, key)) as api:
                await server.wait_ready(api)
                for ask in (api.generate([1], {}), api.requests(), api.add_engine("http://h:1")):
                    with pytest.raises(EngineError, match="answered 401") as caught:
                        await ask
                    assert not caught.value.is_transient
        finally:
            server.kill()

    asyncio.run(main())
