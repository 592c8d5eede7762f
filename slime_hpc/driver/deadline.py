"""Waits that end: each has a deadline, says what it waits for, and shows while it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slime_hpc.errors import DeadlineExceeded

T = TypeVar("T")
SHOW_EVERY_S = 15.0


def say(text: str) -> None:
    """One line in the driver's log."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """The awaitable's result. DeadlineExceeded naming ``what`` if it takes longer."""
    task = asyncio.ensure_future(awaitable)
    started = time.monotonic()
    while True:
        left = started + seconds - time.monotonic()
        done, _ = await asyncio.wait([task], timeout=min(SHOW_EVERY_S, max(0.0, left)))
        if done:
            return task.result()
        if left <= SHOW_EVERY_S:
            task.cancel()
            raise DeadlineExceeded(f"{what} took longer than {seconds:.0f} s")
        say(f"waiting for {what} ({time.monotonic() - started:.0f} s of at most {seconds:.0f} s)")


async def until(seconds: float, what: Callable[[], str], look: Callable[[], T | None]) -> T:
    """Poll ``look`` until it returns something. ``what()`` says what is still missing."""
    deadline = time.monotonic() + seconds
    shown = time.monotonic()
    while not (found := look()):
        now = time.monotonic()
        if now > deadline:
            raise DeadlineExceeded(f"{what()} did not appear within {seconds:.0f} s")
        if now - shown > SHOW_EVERY_S:
            say(f"waiting for {what()}")
            shown = now
        await asyncio.sleep(0.2)
    return found
