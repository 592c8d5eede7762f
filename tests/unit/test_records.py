"""JSONL as a killed writer leaves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_hpc import records
from slime_hpc.errors import UserError
from slime_hpc.records import (
    TAIL_BYTES,
    append_jsonl,
    last_round_row,
    read_ended,
    read_heartbeat,
    read_owner,
    read_rounds,
    read_submit,
)


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def test_last_row_of_nothing(tmp_path: Path) -> None:
    assert last_round_row(tmp_path / "none") is None
    assert last_round_row(write(tmp_path / "empty")) is None
    assert last_round_row(write(tmp_path / "torn", b'{"round": 1')) is None


@pytest.mark.parametrize("block", [1, 7, 16, TAIL_BYTES])
@pytest.mark.parametrize("torn", [b"", b'{"round": 2, "x"', b'{"round"\n', b"\xc3"])
def test_last_row_is_that_of_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, torn: bytes
) -> None:
    """Whatever is torn, and however the blocks fall; a nested row is not taken for a row of its own."""
    monkeypatch.setattr(records, "TAIL_BYTES", block)
    path = write(
        tmp_path / "m.jsonl", b'{"round": 0, "attempt": 1}\n', b'{"round": 1, "attempt": 1, "n": {"round": 9}}\n', torn
    )
    assert last_round_row(path) == read_rounds(path)[-1] == {"round": 1, "attempt": 1, "n": {"round": 9}}


def test_last_row_reads_no_more_than_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    for number in range(10_000):
        append_jsonl(path, {"round": number, "attempt": 1})
    parsed: list[Any] = []
    loads = records.json.loads
    monkeypatch.setattr(records.json, "loads", lambda text: parsed.append(text) or loads(text))
    assert last_round_row(path) == {"round": 9_999, "attempt": 1}
    assert len(parsed) == 1


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{}", b'{"time": "now"}', b'{"cause"', b"\xff\xfe"])
@pytest.mark.parametrize("read", [read_submit, read_owner, read_ended, read_heartbeat])
def test_a_damaged_record_is_named(tmp_path: Path, read: Callable[[Path], Any], content: bytes) -> None:
    assert read(tmp_path / "r.json") is None
    with pytest.raises(UserError, match=r"r.json .*slime-hpc writes this file and nobody edits it"):
        read(write(tmp_path / "r.json", content))
    (tmp_path / "directory").mkdir()
    with pytest.raises(UserError, match="directory cannot be read: Is a directory"):
        read(tmp_path / "directory")


def test_what_is_no_round_is_passed_over(tmp_path: Path) -> None:
    foreign = (b"null\n", b"[1]\n", b"7\n", b'{"round": "x", "attempt": 1}\n', b'{"a": 1}\n')
    path = write(tmp_path / "m.jsonl", *foreign, b'{"round": 4, "attempt": 2}\n', *foreign)
    assert read_rounds(path) == [last_round_row(path)] == [{"round": 4, "attempt": 2}]
