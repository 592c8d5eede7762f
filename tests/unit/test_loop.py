"""What the loop does when: against a fleet that only takes notes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.checkpoint import Manifest
from slime_hpc.loop import is_due, run_rounds
from slime_hpc.records import surviving_rounds
from slime_hpc.spec.load import load_profile
from slime_hpc.types import Groups, Sample, TrainBatch


def manifest(round_: int) -> Manifest:
    return Manifest(
        attempt=1, round=round_, step=round_ + 1, weight_version="1.1", data={}, spec_fingerprint="", shards=()
    )


class NotingFleet:
    """Fleet and recorder in one: ``notes`` holds what was called, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []

    async def generate(self, round_: int) -> Groups:
        self.notes.append(f"generate {round_}")
        return [[Sample(0, i, "p", tokens=[1, 2], response_length=1, loss_mask=[1]) for i in range(2)]]

    async def score(self, groups: Groups) -> None:
        for sample in groups[0]:
            sample.reward = float(sample.index)

    async def evaluate(self) -> dict[str, Groups]:
        self.notes.append("evaluate")
        return {}

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        self.notes.append("train")
        return {}

    async def publish_weights(self) -> None:
        self.notes.append("publish")

    async def save(self, round_: int) -> Manifest:
        self.notes.append(f"save {round_}")
        return manifest(round_)

    async def commit(self, saved: Manifest) -> None:
        self.notes.append(f"commit {saved.round}")

    async def export(self) -> None:
        self.notes.append("export")

    def phase(self, name: str, round_: int) -> None: ...

    def evaluated(self, rounds: int, sets: dict[str, Groups]) -> dict[str, float]:
        self.notes.append(f"evaluated {rounds}")
        return {"eval/a": rounds / 10}

    def round_done(self, round_: int, groups: Groups, metrics: dict[str, Any]) -> None:
        self.notes.append(f"record {round_}")
        self.rows.append(metrics)

    def finished(self, groups: Groups) -> None: ...


def test_held_out_prompts_are_answered_before_between_and_after(quickstart: Path) -> None:
    sets = ["num_rollout=3", "eval={interval: 2, sets: [{name: a, prompt_data: prompts.jsonl}]}"]
    fleet = NotingFleet()
    asyncio.run(run_rounds(fleet, fleet, load_profile(quickstart, sets=sets).spec))
    turn = ["train", "publish"]
    assert fleet.notes == [
        *["publish", "evaluate", "evaluated 0"],
        *["generate 0", *turn, "record 0"],
        *["generate 1", *turn, "evaluate", "evaluated 2", "record 1"],
        *["generate 2", *turn, "evaluate", "evaluated 3", "save 2", "record 2", "commit 2"],
        *["export", "generate 3"],
    ]
    assert [row.get("eval/a") for row in fleet.rows] == [None, 0.2, 0.3]


class Killed(Exception):
    pass


class MortalFleet(NotingFleet):
    """Is killed at a note, and leaves what a run directory would keep: rows, and the newest commit."""

    def __init__(self, dies_at: int, attempt: int) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.attempt = attempt
        self.notes = Countdown(self)

    def round_done(self, round_: int, groups: Groups, metrics: dict[str, Any]) -> None:
        super().round_done(round_, groups, {"round": round_, "attempt": self.attempt})


class Countdown(list[str]):
    def __init__(self, fleet: MortalFleet) -> None:
        self._fleet = fleet

    def append(self, note: str) -> None:
        if len(self) == self._fleet.dies_at:
            raise Killed(note)
        super().append(note)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("dies_at", range(40))
def test_killed_anywhere_each_round_is_recorded_once(quickstart: Path, dies_at: int, interval: int) -> None:
    sets = ["num_rollout=4", f"checkpoint.interval={interval}"]
    spec = load_profile(quickstart, sets=sets).spec
    killed, resumed = MortalFleet(dies_at, attempt=1), MortalFleet(dies_at=1000, attempt=2)
    with contextlib.suppress(Killed):  # past its last note it lives
        asyncio.run(run_rounds(killed, killed, spec))
    commits = [int(note.split()[1]) for note in killed.notes if note.startswith("commit")]
    first = commits[-1] + 1 if commits else 0
    asyncio.run(run_rounds(resumed, resumed, spec, first))
    assert [row["round"] for row in surviving_rounds(killed.rows + resumed.rows)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("interval", "rounds"), [(None, [9]), (1, list(range(10))), (4, [3, 7, 9]), (20, [9])])
def test_is_due(interval: int | None, rounds: list[int]) -> None:
    assert [r for r in range(10) if is_due(r, 10, interval)] == rounds
