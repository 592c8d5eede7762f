"""Samples → micro-batches that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of samples whose lengths add up to at most ``max_tokens``; a longer sample stands alone.

    Longest first, each into the first micro-batch with room for it: at most about a fifth more of them than needed.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = next((b for b, free in enumerate(room) if lengths[i] <= free), None)
        if fits is None:
            batches.append([i])
            room.append(max_tokens - lengths[i])
        else:
            batches[fits].append(i)
            room[fits] -= lengths[i]
    return batches
