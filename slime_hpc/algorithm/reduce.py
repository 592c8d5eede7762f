"""Values of tokens → one number."""

from __future__ import annotations

from torch import Tensor


def sum_of_sample_means(values: Tensor, masks: Tensor, token_counts: Tensor | None = None) -> Tensor:
    """Each sample's mean over its unmasked tokens, summed over samples; divide by their number for the mean.

    ``values`` and ``masks`` (1 = counts) are [samples, tokens]. ``token_counts`` [samples] are the denominators:
    by default a sample's own unmasked tokens; samples that share a trajectory pass its total, so that the
    trajectory weighs as much as any other. A sample without unmasked tokens adds 0.
    A sum, because micro-batches and ranks then add up to the whole whatever way it was cut. Source: slime.
    """
    counts = masks.sum(dim=-1) if token_counts is None else token_counts
    return ((values * masks).sum(dim=-1) / counts.clamp(min=1)).sum()
