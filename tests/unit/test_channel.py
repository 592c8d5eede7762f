"""Membership of the weight group: who is dropped when a publication fails, and that the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.types import TensorMeta, WeightVersion
from slime_hpc.weight_sync import channel
from slime_hpc.weight_sync.channel import WeightChannel
from slime_hpc.weight_sync.transaction import WeightSyncError

BUCKETS = [[TensorMeta("w", "float32", (2, 3))]]


class Group:
    """Trainer and engines of one test, and what happened to them in order."""

    def __init__(self, *names: str) -> None:
        self.journal: list[str] = []
        self.engines = {name: Engine(name, self) for name in names}
        self.dropped: dict[str, str] = {}
        self.listening = 0
        self.members: dict[int, str] = {}
        self.world_size = 0
        self.broadcast_error: Exception | None = None
        self.channel = WeightChannel(self, self, BUCKETS, attempt=3, ranks_per_engine=1, backend="gloo", deadline_s=0.3)

    def publish(self, number: int) -> None:
        asyncio.run(self.channel.publish(WeightVersion(3, number)))

    def versions(self) -> dict[str, str]:
        return {engine.url: engine.version for engine in self.serving()}

    # Membership

    def serving(self) -> Sequence[Engine]:
        left = [engine for name, engine in self.engines.items() if name not in self.dropped]
        if not left:
            raise ClusterError("no engine is left")
        return left

    def drop(self, url: str, why: str) -> None:
        self.journal.append(f"drop {url}")
        self.dropped[url] = why

    # WeightSource

    async def listen(self) -> tuple[str, int]:
        assert not self.members, "the former group is still there"
        self.listening += 1
        return "n1", 1000 + self.listening

    async def join(self, world_size: int, group_name: str) -> None:
        self.world_size = world_size
        self.journal.append(f"join {group_name} of {world_size}")

    async def broadcast(self) -> None:
        if any(self.engines[name].is_dead for name in self.members.values()):
            raise ClusterError("Connection closed by peer")
        if self.broadcast_error is not None:
            raise self.broadcast_error

    async def close(self) -> None:
        self.journal.append("close")
        self.members = {}
        for engine in self.engines.values():
            engine.freed.set()


class Engine:
    """Once dead, it refuses; a member that receives while another is dead waits until the trainer closes."""

    def __init__(self, url: str, group: Group) -> None:
        self.url = url
        self.group = group
        self.version = "default"
        self.is_dead = False
        self.is_stuck = False
        self.wrong_version = ""
        self.refuses_to_receive = False
        self.freed = asyncio.Event()

    def _answer(self) -> None:
        if self.is_dead:
            raise ClusterError(f"{self.url} gave no answer")

    async def init_weights_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        self._answer()
        assert port == 1000 + self.group.listening
        self.group.members[rank_offset] = self.url

    async def pause_generation(self) -> None:
        self._answer()

    async def begin_weight_update(self) -> None:
        self._answer()

    async def receive_weights(
        self, tensors: Sequence[TensorMeta], *, group_name: str, version: WeightVersion | None
    ) -> None:
        self._answer()
        if self.refuses_to_receive:
            raise ClusterError(f"{self.url} is out of memory")
        if any(self.group.engines[name].is_dead for name in self.group.members.values()):
            self.freed.clear()
            await self.freed.wait()
            raise ClusterError("Connection closed by peer")
        self.version = str(version)

    async def end_weight_update(self) -> None:
        self._answer()

    async def weight_version(self) -> str:
        self._answer()
        return self.wrong_version or self.version

    async def weights_checksum(self) -> str:
        self._answer()
        return "the trainer's"

    async def continue_generation(self) -> None:
        self._answer()

    async def abandon_weight_update(self, group_name: str) -> None:
        self._answer()
        if self.is_stuck:
            await asyncio.sleep(60)
        assert not self.group.members, "the trainer must leave first"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ANSWER_TIMEOUT_S", 0.1)


def test_one_group_serves_many_versions() -> None:
    group = Group("a", "b")
    group.publish(0)
    group.publish(1)
    assert group.versions() == {"a": "a3.v1", "b": "a3.v1"}
    assert group.journal == ["join a3.g0 of 3"]


def test_an_engine_lost_between_two_versions_is_left_out_of_a_new_group() -> None:
    group = Group("a", "b")
    group.publish(0)
    group.engines["a"].is_dead = True
    group.dropped["a"] = "seen by its actor"
    group.publish(1)
    assert group.versions() == {"b": "a3.v1"}
    assert group.journal == ["join a3.g0 of 3", "close", "join a3.g1 of 2"]


def test_an_engine_dead_but_not_known_to_be_is_dropped_and_the_version_published() -> None:
    group = Group("a", "b", "c")
    group.publish(0)
    group.engines["b"].is_dead = True
    group.publish(1)
    assert group.versions() == {"a": "a3.v1", "c": "a3.v1"}
    assert list(group.dropped) == ["b"] and "gave no answer" in group.dropped["b"]
    assert group.journal[1:] == ["close", "drop b", "join a3.g1 of 3"]


def die_as_sending_starts(group: Group, name: str) -> None:
    async def begin() -> None:
        group.engines[name].is_dead = True

    group.engines[name].begin_weight_update = begin  # type: ignore[method-assign]


def test_of_those_who_fail_in_the_transfer_only_the_dead_one_is_dropped() -> None:
    """The trainer's error comes first and names no engine; the other engine hangs until the trainer leaves."""
    group = Group("a", "b")
    die_as_sending_starts(group, "b")
    group.publish(0)
    assert group.versions() == {"a": "a3.v0"}
    assert list(group.dropped) == ["b"]
    assert group.journal == ["join a3.g0 of 3", "close", "drop b", "join a3.g1 of 2"]


def test_an_engine_that_stays_stuck_is_dropped() -> None:
    group = Group("a", "b", "c")
    die_as_sending_starts(group, "b")
    group.engines["c"].is_stuck = True
    group.publish(0)
    assert group.versions() == {"a": "a3.v0"}
    assert "did not leave the weight group" in group.dropped["c"]


def test_an_engine_that_acknowledges_another_version_never_serves() -> None:
    group = Group("a", "b")
    group.engines["a"].wrong_version = "a3.v9"
    group.publish(0)
    assert group.versions() == {"b": "a3.v0"}
    assert "'a3.v9'" in group.dropped["a"]


def test_a_failure_that_nobody_explains_is_tried_once_more_and_then_blamed_on_who_failed() -> None:
    group = Group("a", "b")
    group.engines["b"].refuses_to_receive = True
    group.publish(0)
    assert group.versions() == {"a": "a3.v0"}
    assert "out of memory" in group.dropped["b"]
    assert [entry for entry in group.journal if entry.startswith("join")] == [
        "join a3.g0 of 3",
        "join a3.g1 of 3",
        "join a3.g2 of 2",
    ]


def test_a_trainer_that_cannot_send_fails_the_publication_and_drops_nobody() -> None:
    group = Group("a", "b")
    group.broadcast_error = ClusterError("no memory")
    with pytest.raises(WeightSyncError, match="no memory"):
        group.publish(0)
    assert group.dropped == {}


def test_when_none_is_left_the_publication_fails() -> None:
    group = Group("a")
    group.publish(0)
    group.engines["a"].is_dead = True
    with pytest.raises(ClusterError, match="no engine is left"):
        group.publish(1)
    assert list(group.dropped) == ["a"]
