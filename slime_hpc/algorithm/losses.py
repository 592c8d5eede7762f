"""Log-probs and advantages → loss of each token."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate: no gain from moving a token's probability further than the clip range.

    All of one shape, or broadcast to it. Returns the loss of each token, and 1 where the clip decided it, else 0.
    The ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
    Source: PPO, arXiv:1707.06347; the two-sided range is DAPO's, arXiv:2503.14476.
    """
    ratio = (log_probs - old_log_probs).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    return torch.maximum(free, clipped), (clipped > free).float()
