"""Rewards → advantages."""

from __future__ import annotations

from torch import Tensor

STD_EPS = 1e-6
"""Keeps a group whose rewards are all equal at advantage 0 instead of 0/0."""


def grpo_advantages(rewards: Tensor, *, normalize_std: bool = True) -> Tensor:
    """GRPO: how much better a sample is than its group, in standard deviations of the group.

    ``rewards`` [groups, samples] → same shape, float. The deviation is the unbiased one (N-1); a group of one
    sample has none, and gets 0. ``normalize_std=False`` only subtracts the mean (Dr. GRPO, arXiv:2503.20783).
    Source: DeepSeekMath, arXiv:2402.03300.
    """
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    if not normalize_std or rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(dim=-1, keepdim=True) + STD_EPS)
