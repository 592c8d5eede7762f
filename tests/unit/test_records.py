"""JSONL as a killed writer leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_hpc import records
from slime_hpc.records import TAIL_BYTES, append_jsonl, last_jsonl_row, read_jsonl


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def test_last_row_of_nothing(tmp_path: Path) -> None:
    assert last_jsonl_row(tmp_path / "none") is None
    assert last_jsonl_row(write(tmp_path / "empty")) is None
    assert last_jsonl_row(write(tmp_path / "torn", b'{"round": 1')) is None


@pytest.mark.parametrize("block", [1, 7, 16, TAIL_BYTES])
@pytest.mark.parametrize("torn", [b"", b'{"round": 2, "x"', b'{"round"\n', b"\xc3"])
def test_last_row_is_that_of_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, torn: bytes
) -> None:
    """Whatever is torn, and however the blocks fall; a nested row is not taken for a row of its own."""
    monkeypatch.setattr(records, "TAIL_BYTES", block)
    path = write(tmp_path / "m.jsonl", b'{"round": 0}\n', b'{"round": 1, "n": {"round": 9}}\n', torn)
    assert last_jsonl_row(path) == list(read_jsonl(path))[-1] == {"round": 1, "n": {"round": 9}}


def test_last_row_reads_no_more_than_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    for number in range(10_000):
        append_jsonl(path, {"round": number})
    parsed: list[Any] = []
    loads = records.json.loads
    monkeypatch.setattr(records.json, "loads", lambda text: parsed.append(text) or loads(text))
    assert last_jsonl_row(path) == {"round": 9_999}
    assert len(parsed) == 1
