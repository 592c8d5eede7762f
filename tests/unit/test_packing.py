from __future__ import annotations

from slime_hpc.trainer.packing import micro_batches


def test_rectangles_stay_below_the_budget_and_hold_every_sample_once() -> None:
    lengths = [3, 9, 10, 2, 30, 4]
    packed = list(micro_batches(lengths, 20))
    assert packed == [[4], [2, 1], [5, 0, 3]], "the sample of 30 alone, although longer than the budget"


def test_samples_without_tokens_and_no_samples() -> None:
    assert list(micro_batches([0, 0], 8)) == [[0, 1]]
    assert list(micro_batches([], 8)) == []
