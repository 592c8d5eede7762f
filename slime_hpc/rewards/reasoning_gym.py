"""The verifier ``rm_type: reasoning_gym``."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

from reasoning_gym.utils import extract_answer

from slime_hpc.rewards.worker import Unverifiable
from slime_hpc.spec.run import ReasoningGym
from slime_hpc.spec.sources import open_reasoning_gym
from slime_hpc.types import Sample


def grade(args: Any, sample: Sample) -> float:
    """What the task's own verifier says, from 0 to 1; many give part of the credit for an answer nearly right.

    The answer is what stands in the last ``<answer>…</answer>``, else the whole response.
    """
    dataset = _dataset(json.dumps(sample.metadata["reasoning_gym"], sort_keys=True))
    entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
    answer = extract_answer(sample.response) or sample.response.strip()
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # some of the package's verifiers take any answer for one of the form they asked for
        raise Unverifiable(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(score):
        raise Unverifiable(f"its score is {score}")
    return score


@cache
def _dataset(recipe: str) -> Any:
    return open_reasoning_gym(ReasoningGym.model_validate_json(recipe))
