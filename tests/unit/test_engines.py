"""What the loss of an engine means to an attempt."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.driver.engines import Engine, Engines
from slime_hpc.driver.health import Evidence, Fault, Member
from slime_hpc.errors import ClusterError
from slime_hpc.records import EventLog, read_jsonl
from slime_hpc.rollout.client import EngineClient, EngineKeys
from slime_hpc.supervisor.cause import Cause, Ending
from slime_hpc.testing.fake_router import FakeRouter
from slime_hpc.types import Role


class Attempt:
    """Engines 0 and 1 on n3, engine 2 on n4."""

    def __init__(self, path: Path) -> None:
        self.told: list[Fault] = []
        self.killed: list[str] = []
        self._events = path / "events.jsonl"
        log = EventLog(self._events, attempt=1, who="driver")
        self.engines = Engines(self.told.append, log, lambda member: self.killed.append(member.name))
        self.router = FakeRouter({})

    async def admit(self) -> None:
        engines = [self._engine(i, node) for i, node in enumerate(("n3", "n3", "n4"))]
        await self.engines.admit(engines, self.router)

    @staticmethod
    def _engine(index: int, node: str) -> Engine:
        return Engine(Member(None, Role.ROLLOUT, node, f"engine {index}"), EngineClient(url(index), EngineKeys("", "")))

    async def routed(self) -> list[str]:
        """Who is in the router, once it has done what it was told."""
        await asyncio.sleep(0.01)
        return list(await self.router.requests())

    def serving(self) -> list[str]:
        return [client.url for client in self.engines.serving()]

    def dropped(self) -> list[tuple[Any, ...]]:
        rows = read_jsonl(self._events)
        return [(row["engine"], row["node"], row["left"]) for row in rows if row["event"] == "engine_dropped"]


def url(index: int) -> str:
    return f"http://engine-{index}"


def ended(index: int, node: str = "n3") -> Fault:
    ending = Ending(Cause.CRASHED, f"engine {index} ended", Role.ROLLOUT, node)
    return Fault(Evidence.PROCESS, ending, f"engine {index}")


def node_died(node: str) -> Fault:
    return Fault(Evidence.AGENT, Ending(Cause.NODE_FAILURE, "its raylet ended", Role.ROLLOUT, node))


def test_the_others_go_on_without_it(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path)
        await attempt.admit()
        attempt.engines.lose(ended(0))
        attempt.engines.lose(ended(0))
        assert attempt.serving() == [url(1), url(2)] == await attempt.routed()
        assert (attempt.killed, attempt.told) == (["engine 0"], [])
        assert attempt.dropped() == [("engine 0", "n3", 2)]

    asyncio.run(run())


def test_a_node_takes_all_its_engines(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path)
        await attempt.admit()
        attempt.engines.lose(node_died("n3"))
        assert attempt.serving() == [url(2)] == await attempt.routed()
        assert attempt.told == []

    asyncio.run(run())


def test_the_last_loss_is_told_and_so_is_every_better_witness_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path)
        await attempt.admit()
        attempt.engines.lose(node_died("n3"))
        attempt.engines.drop(url(2), "it gave no answer")
        attempt.engines.lose(ended(2, "n4"))
        assert [fault.evidence for fault in attempt.told] == [Evidence.LOOP, Evidence.PROCESS]
        with pytest.raises(ClusterError, match="no engine is left"):
            attempt.serving()
        assert attempt.dropped()[-1] == ("engine 2", "n4", 0)

    asyncio.run(run())


def test_before_all_are_up_any_loss_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path)
        attempt.engines.lose(ended(0))
        assert attempt.told == [ended(0)]
        assert attempt.dropped() == []

    asyncio.run(run())


def test_another_thread_may_report(tmp_path: Path) -> None:
    async def run() -> Attempt:
        attempt = Attempt(tmp_path)
        await attempt.admit()
        reporter = threading.Thread(target=attempt.engines.report, args=(node_died("n4"),))
        reporter.start()
        await asyncio.to_thread(reporter.join)
        await asyncio.sleep(0.01)
        assert attempt.serving() == [url(0), url(1)]
        return attempt

    asyncio.run(run()).engines.report(node_died("n3"))  # the run is over: nothing happens


def test_a_trainers_node_of_that_name_is_not_an_engines(tmp_path: Path) -> None:
    member = Member(None, Role.ROLLOUT, "n3", "engine 0")
    trainer = Fault(Evidence.AGENT, Ending(Cause.NODE_FAILURE, "", Role.TRAINER, "n3"))
    assert not trainer.concerns(member)
    assert node_died("n3").concerns(member)
    assert not ended(1).concerns(member)
