"""What runs inside a reward worker. Imports nothing heavy: every worker is a fresh interpreter."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_hpc.types import Sample

IMPORT_TIMEOUT_S = 120.0
"""Importing a reward's module on a cold shared file system."""
TRACEBACK_LINES = 8


@dataclass(frozen=True)
class Outcome:
    """What became of one call: a value and the sample's metadata, or why there is none."""

    value: float = math.nan
    metadata: dict[str, Any] | None = None
    problem: str | None = None
    killed: bool = False
    """It had no say: its process hung or died, or it could not make sense of the answer."""


class Unverifiable(Exception):
    """A verifier of ours could not make sense of an answer."""


class Args(SimpleNamespace):
    """The read-only namespace a reward gets as its first argument: slime's flag names."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"args.{name} is read-only")


def prepare(profile_dir: Path, path: str) -> None:
    """Make modules beside the profile importable, and end this worker when its parent does, even in a call.

    The reward is imported at once: its seconds of imports are no sample's.
    """
    sys.path.insert(0, str(profile_dir))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    overdue = threading.Timer(IMPORT_TIMEOUT_S, os._exit, args=[1])
    overdue.start()
    find_problem(path)
    overdue.cancel()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def find_problem(path: str) -> str | None:
    """Why ``module.function`` cannot be called, or None."""
    try:
        _load(path)
    except BaseException as error:  # noqa: BLE001 - user code: a SystemExit while importing is a finding too
        return _tail(error)
    return None


def grade(path: str, args: Args, sample: Sample) -> Outcome:
    """Call the reward on one sample; its exceptions come back as text, since they may not pickle."""
    try:
        value = _load(path)(args, sample)
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
    except Unverifiable as error:
        return Outcome(problem=str(error), killed=True)
    except BaseException as error:  # noqa: BLE001 - user code: a SystemExit must not end the worker unexplained
        return Outcome(problem=_tail(error))
    if isinstance(value, bool) or not _is_number(value):
        return Outcome(problem=f"returned {value!r}, not a finite number")
    try:
        json.dumps(sample.metadata)
    except (TypeError, ValueError) as error:
        return Outcome(problem=f"left metadata that is no JSON value: {error}")
    return Outcome(float(value), sample.metadata)


@cache
def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is not of the form module.function")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise TypeError(f"{path} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except TypeError:
        return False  # that is the answer: not a number


def _tail(error: BaseException) -> str:
    """The last lines of the traceback, the exception itself being the last."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])
