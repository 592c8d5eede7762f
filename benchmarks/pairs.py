"""Two ways to the same end, measured in turns, so that whatever else the machine does meets both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MIN_PAIRS = 5


@dataclass(frozen=True)
class Pairs:
    """What ours and its baseline took, or achieved, in turns."""

    name: str
    unit: str
    ours: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Of each pair: its two members met the same machine."""
        return [a / b for a, b in zip(self.ours, self.baseline, strict=True)]


def alternate(
    name: str,
    unit: str,
    ours: Callable[[], float],
    baseline: Callable[[], float],
    *,
    pairs: int = MIN_PAIRS,
    warm_up: int = 1,
) -> Pairs:
    """Call the two in turns; each returns its figure. The first ``warm_up`` pairs are not counted."""
    taken = [(ours(), baseline()) for _ in range(warm_up + pairs)][warm_up:]
    return Pairs(name, unit, tuple(a for a, _ in taken), tuple(b for _, b in taken))


def table(rows: Iterable[Pairs]) -> str:
    """Markdown: medians, the median of the pairs' ratios, and their spread."""
    lines = ["| | ours | baseline | ratio | from – to | pairs |", "|---|--:|--:|--:|--:|--:|"]
    lines += [_row(pairs) for pairs in rows]
    return "\n".join(lines)


def _row(pairs: Pairs) -> str:
    ours, baseline = (f"{statistics.median(side):.3g} {pairs.unit}" for side in (pairs.ours, pairs.baseline))
    ratios = pairs.ratios
    spread = f"{min(ratios):.2f} – {max(ratios):.2f}"
    return f"| {pairs.name} | {ours} | {baseline} | {statistics.median(ratios):.2f} | {spread} | {len(ratios)} |"
