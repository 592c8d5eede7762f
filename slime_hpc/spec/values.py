"""Slurm's spellings of time and memory, as pydantic types."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer


class Strict(BaseModel):
    """Base of every schema: unknown keys refused, values frozen.

    Only aliases are read and written (``time_limit: 0:30:00``), so that a unit in a field's name never
    disagrees with its text, and JSON survives the round trip.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")


def parse_time_s(text: str) -> int:
    """Seconds of a Slurm time: ``90`` (minutes), ``4:00``, ``1:00:00``, ``2-12``, ``3-0:00``, ``1-00:00:00``.

    ValueError on anything else, ``UNLIMITED`` included: a run needs a limit it can plan with.
    Source: sbatch(1), ``--time``.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Slurm time (write 90 for minutes, 4:00:00, or 1-12:00:00)")
    fields = [int(f) for f in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*fields, 0, 0][:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(fields) == 3:
        return fields[0] * 3600 + fields[1] * 60 + fields[2]
    minutes, seconds = [*fields, 0][:2]
    return minutes * 60 + seconds


def format_time(seconds: int) -> str:
    """``D-HH:MM:SS`` or ``HH:MM:SS``, as Slurm prints it."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


_MEM = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_MB_PER = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_mem_mb(text: str) -> int:
    """Megabytes of a Slurm memory size: ``4000``, ``64G``, ``1T``; ``0`` means the whole node."""
    match = _MEM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Slurm memory size (write 64G or 65536M)")
    return math.ceil(int(match["number"]) * _MB_PER[match["unit"].upper()])


def _time_limit(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a time")
    seconds = parse_time_s(value) if isinstance(value, str) else value * 60
    if seconds < 60:
        raise ValueError(f"{value!r} is under Slurm's smallest limit of one minute")
    return seconds


def _mem(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a memory size")
    return parse_mem_mb(str(value))


TimeLimit = Annotated[int, BeforeValidator(_time_limit), PlainSerializer(format_time, when_used="json")]
"""Seconds; written in a profile in Slurm's spelling, a bare number being minutes."""

Memory = Annotated[int, BeforeValidator(_mem)]
"""Megabytes; written in a profile in Slurm's spelling."""


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        shown = repr(value) if len(value) <= 63 else f"{value[:20]!r}… of {len(value)} characters"
        raise ValueError(
            f"{shown} is not a name: it becomes part of a job's and of files' names, so write letters, digits and ._- "
            "only, a letter or digit first, at most 63 of them"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
"""Of a run or an evaluation set; safe wherever it is written."""
