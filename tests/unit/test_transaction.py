"""The weight transaction: the order of its phases, and who is named when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.types import TensorMeta, WeightVersion
from slime_hpc.weight_sync.transaction import WeightSyncError, connect, group_name, publish

BUCKETS = [[TensorMeta("w", "float32", (2, 3))], [TensorMeta("v", "bfloat16", (4,)), TensorMeta("u", "float32", ())]]
VERSION = WeightVersion(2, 7)


class Engine:
    """Notes every call in a shared journal; fails in one, hangs in one, or acknowledges another version."""

    def __init__(self, url: str, journal: list[tuple[str, str]], *, fails: str = "", hangs: str = "", has: str = ""):
        self.checksum = "right"
        self.url = url
        self.journal = journal
        self.fails = fails
        self.hangs = hangs
        self.version = has
        self.offset = -1
        self.received: list[tuple[list[TensorMeta], WeightVersion | None]] = []

    async def _note(self, call: str) -> None:
        self.journal.append((call, self.url))
        await asyncio.sleep(0)
        if call == self.fails:
            raise ClusterError(f"{self.url} said no")
        if call == self.hangs:
            await asyncio.sleep(60)

    async def init_weights_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        assert (host, port, world_size, group_name, backend) == ("n1", 99, 5, "a2.g1", "gloo")
        self.offset = rank_offset
        await self._note("init")

    async def pause_generation(self) -> None:
        await self._note("pause")

    async def begin_weight_update(self) -> None:
        await self._note("begin")

    async def receive_weights(
        self, tensors: Sequence[TensorMeta], *, group_name: str, version: WeightVersion | None
    ) -> None:
        assert group_name == "g"
        self.received.append((list(tensors), version))
        await self._note("receive")
        if version is not None:
            self.version = self.version or str(version)

    async def end_weight_update(self) -> None:
        await self._note("end")

    async def weight_version(self) -> str:
        await self._note("version")
        return self.version

    async def weights_checksum(self) -> str:
        await self._note("checksum")
        return self.checksum

    async def continue_generation(self) -> None:
        await self._note("continue")

    async def abandon_weight_update(self, group_name: str) -> None:
        raise AssertionError("a group outlives a publication")


def run_publish(engines: Sequence[Engine], journal: list[tuple[str, str]], *, broadcast_fails: bool = False) -> None:
    async def broadcast() -> None:
        journal.append(("broadcast", "trainer"))
        if broadcast_fails:
            raise RuntimeError("Connection closed by peer")

    asyncio.run(publish(engines, broadcast, BUCKETS, version=VERSION, group_name="g", deadline_s=0.2))


def test_all_engines_finish_a_phase_before_any_starts_the_next() -> None:
    journal: list[tuple[str, str]] = []
    engines = [Engine("e0", journal), Engine("e1", journal)]
    run_publish(engines, journal)
    order = ["pause", "begin", "receive", "receive", "end", "version", "checksum", "continue"]
    calls = [call for call, _ in journal if call != "broadcast"]
    assert calls == [phase for phase in order for _ in range(2)]
    assert [e.received for e in engines] == [[(BUCKETS[0], None), (BUCKETS[1], VERSION)]] * 2, "the last one has it"
    assert ("broadcast", "trainer") in journal[4:7]


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("pause", "pause"),
        ("begin", "begin"),
        ("receive", "transfer"),
        ("end", "end"),
        ("version", "acknowledge"),
        ("checksum", "checksum"),
    ],
)
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_one_bad_engine_is_named_and_no_engine_generates_again(call: str, phase: str, how: str) -> None:
    journal: list[tuple[str, str]] = []
    bad = Engine("e1", journal, fails=call) if how == "fails" else Engine("e1", journal, hangs=call)
    with pytest.raises(WeightSyncError, match="said no" if how == "fails" else "no answer within 0.2 s") as caught:
        run_publish([Engine("e0", journal), bad], journal)
    assert (caught.value.phase, caught.value.who) == (phase, ("e1",))
    assert not [entry for entry in journal if entry[0] == "continue"]
    if phase in ("pause", "begin"):
        assert ("broadcast", "trainer") not in journal


def test_a_broken_broadcast_names_the_trainer() -> None:
    journal: list[tuple[str, str]] = []
    with pytest.raises(WeightSyncError, match="Connection closed by peer") as caught:
        run_publish([Engine("e0", journal, hangs="receive")], journal, broadcast_fails=True)
    assert (caught.value.phase, caught.value.who) == ("transfer", ("the trainer",))


def test_another_version_is_not_an_acknowledgement() -> None:
    journal: list[tuple[str, str]] = []
    with pytest.raises(WeightSyncError, match=r"'a2\.v6', not 'a2\.v7'") as caught:
        run_publish([Engine("e0", journal, has="a2.v6")], journal)
    assert caught.value.phase == "acknowledge"


@pytest.mark.parametrize(
    ("checksums", "named"),
    [(("x", "y", "x"), ("e1",)), (("x", "y"), ("e0", "e1")), (("x", "y", "x", "y"), ("e0", "e1", "e2", "e3"))],
)
def test_engines_with_different_weights_do_not_serve(checksums: tuple[str, ...], named: tuple[str, ...]) -> None:
    journal: list[tuple[str, str]] = []
    engines = [Engine(f"e{i}", journal) for i in range(len(checksums))]
    for engine, checksum in zip(engines, checksums, strict=True):
        engine.checksum = checksum
    with pytest.raises(WeightSyncError, match="different weights of one version") as caught:
        run_publish(engines, journal)
    assert (caught.value.phase, caught.value.who) == ("checksum", named)
    assert not [entry for entry in journal if entry[0] == "continue"]


def test_connect_gives_every_engine_its_ranks() -> None:
    journal: list[tuple[str, str]] = []
    engines = [Engine("e0", journal), Engine("e1", journal)]
    joined: list[int] = []

    async def join(world_size: int) -> None:
        joined.append(world_size)

    asyncio.run(
        connect(
            engines,
            join,
            host="n1",
            port=99,
            ranks_per_engine=2,
            group_name=group_name(2, 1),
            backend="gloo",
            deadline_s=1.0,
        )
    )
    assert joined == [5]
    assert [e.offset for e in engines] == [1, 3]
