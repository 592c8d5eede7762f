"""Rewards → advantages."""

from __future__ import annotations

from torch import Tensor

STD_EPS = 1e-6
"""Added to the deviation, as slime does."""


def grpo_advantages(rewards: Tensor, *, normalize_std: bool = True) -> Tensor:
    """GRPO: how much better a sample is than its group, in standard deviations of the group.

    ``rewards`` [groups, samples] → same shape, float. The deviation is the unbiased one (N-1); a group of one
    sample has none, and gets 0, as do those of a group whose rewards are all equal, however the mean is rounded.
    ``normalize_std=False`` only subtracts the mean (Dr. GRPO, arXiv:2503.20783).
    Source: DeepSeekMath, arXiv:2402.03300.
    """
    equal = (rewards == rewards[..., :1]).all(dim=-1, keepdim=True)
    centred = (rewards - rewards.mean(dim=-1, keepdim=True)).masked_fill(equal, 0.0)
    if not normalize_std or rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(dim=-1, keepdim=True) + STD_EPS)
