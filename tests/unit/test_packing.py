from __future__ import annotations

from slime_hpc.trainer.packing import micro_batches


def test_every_sample_is_in_one_micro_batch_that_fits_unless_it_is_longer_itself() -> None:
    lengths = [3, 25, 9, 8, 1, 11, 4, 10]
    packed = micro_batches(lengths, 20)
    assert sorted(i for batch in packed for i in batch) == list(range(8))
    assert packed[0] == [1], "25 > 20"
    assert all(sum(lengths[i] for i in batch) <= 20 for batch in packed[1:])


def test_room_left_by_long_samples_is_filled_with_short_ones() -> None:
    assert micro_batches([4, 12, 8, 16], 20) == [[3, 0], [1, 2]]


def test_empty_samples_and_empty_batches_are_packed() -> None:
    assert micro_batches([0, 0], 8) == [[0, 1]]
    assert micro_batches([], 8) == []
