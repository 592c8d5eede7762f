"""Files that survive a kill at any moment: atomic JSON, and JSONL that tolerates a torn last line."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from slime_hpc.errors import UserError

TAIL_BYTES = 64 * 1024
"""Read at a time from a file's end: more than any row of metrics."""


def restrict_umask() -> None:
    """Whatever this process and its children create, nobody but its user and group can write, and its user can.

    One rule for all files of a run, whatever the shell's umask: the run directory itself has mode 0700.
    """
    inherited = os.umask(0o077)
    os.umask((inherited & 0o077) | 0o002)


def write_text_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace ``path`` so that a reader sees the old text or the new, never a part; survives power loss.

    OSError with the name of ``path``, and nothing left behind, where it cannot be written.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        error.filename = str(path)  # of a full disk the kernel does not say which file it was
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    write_text_atomic(path, json.dumps(value, indent=2) + "\n", mode)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


_NUMBER = (int, float)
_TEXT_OR_NONE = (str, NoneType)


def read_submit(path: Path) -> dict[str, Any] | None:
    """``submit.json``; None where there is none, UserError where it is damaged. So with the other records below."""
    return _read_record(path, attempt=int, job_id=_TEXT_OR_NONE, cluster=_TEXT_OR_NONE, submitted=_NUMBER)


def read_owner(path: Path) -> dict[str, Any] | None:
    return _read_record(path, job_id=_TEXT_OR_NONE, restart_count=int, host=str, started=_NUMBER)


def read_ended(path: Path) -> dict[str, Any] | None:
    return _read_record(path, cause=str, detail=str, started=_NUMBER, ended=_NUMBER)


def read_heartbeat(path: Path) -> dict[str, Any] | None:
    return _read_record(path, time=_NUMBER, attempt=int, phase=str, round=(int, NoneType))


def _read_record(path: Path, **fields: type | tuple[type, ...]) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise UserError(f"{path} cannot be read: {reason}; {_OURS}") from error
    there = record if isinstance(record, dict) else {}
    wrong = [name for name, kind in fields.items() if name not in there or not isinstance(there[name], kind)]
    if wrong:
        raise UserError(f"{path} is damaged: no {wrong[0]!r}, or not what belongs there; {_OURS}")
    return there


_OURS = "slime-hpc writes this file and nobody edits it: restore it from a copy, or begin a new run"


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_jsonl(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows, and wait until they are on disk. Each file has one writer: O_APPEND is not atomic on NFS."""
    with open(path, "ab") as file:
        if file.tell() and _last_byte(path) != b"\n":
            # The previous writer was killed mid-row: close its torn line, so that ours stays whole.
            file.write(b"\n")
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows in order; a torn line (its writer was killed) is passed over. A missing file has no rows."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # a writer killed mid-append leaves one such line; the rows around it are good
            if isinstance(row, dict):
                yield row


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """``metrics.jsonl``: the rows of rounds, all attempts' in order."""
    return [row for row in read_jsonl(path) if _is_round(row)]


def _is_round(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("round"), int) and isinstance(row.get("attempt"), int)


def surviving_rounds(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl`` as they count: a round that a later attempt repeated replaces it and all after it.

    What an attempt still wrote when a later one had begun does not count.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        if kept and row["attempt"] < kept[-1]["attempt"]:
            continue
        while kept and kept[-1]["round"] >= row["round"]:
            kept.pop()
        kept.append(row)
    return kept


def last_round_row(path: Path) -> dict[str, Any] | None:
    """The last whole row of ``metrics.jsonl``; None where there is none. Reads from the end: a long run's is large."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0:
            size = min(start, TAIL_BYTES)
            start = file.seek(start - size)
            tail = file.read(size) + tail
            lines = tail.splitlines()
            for line in reversed(lines if start == 0 else lines[1:]):  # the first may lack its beginning
                with contextlib.suppress(ValueError):  # torn, as in read_jsonl
                    row: dict[str, Any] = json.loads(line)
                    if _is_round(row):
                        return row
    return None


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


class EventLog:
    """One process's events of one attempt: ``log("raylet_died", node="n2")`` appends a row.

    Rows have ``time`` (Unix seconds), ``attempt``, ``who``, ``event`` and the given fields. Threads may share it.
    """

    def __init__(self, path: Path, *, attempt: int, who: str) -> None:
        self.path = path
        self.attempt = attempt
        self.who = who
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        row = {"time": round(time.time(), 3), "attempt": self.attempt, "who": self.who, "event": event, **fields}
        with self._lock:
            append_jsonl(self.path, row)
