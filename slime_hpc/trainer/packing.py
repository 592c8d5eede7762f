"""Samples → micro-batches that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of samples of similar length, longest first, so that little of a rectangle is padding.

    A micro-batch padded to its longest sample has at most ``max_tokens`` tokens; a longer sample stands alone.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(by_length):
        width = max(1, lengths[by_length[start]])
        end = start + max(1, max_tokens // width)
        yield by_length[start:end]
        start = end
