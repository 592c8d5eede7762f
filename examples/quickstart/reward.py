"""The quickstart's reward: anything with this signature can be one."""

from typing import Any

TARGET = range(100, 150)


def share_of_target_tokens(args: Any, sample: Any, **kwargs: Any) -> float:
    """Share of the response's tokens that are in TARGET, from 0 to 1."""
    tokens = sample.response_tokens
    return sum(token in TARGET for token in tokens) / max(1, len(tokens))
