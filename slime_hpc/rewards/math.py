"""The verifier ``rm_type: math``."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from slime_hpc.types import Sample

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that our time limit is not its own


def grade(args: Any, sample: Sample) -> float:
    """1 if the last answer equals the label as mathematics, else 0: what math-verify says.

    The last ``\\boxed{…}`` counts where there is one; a list of guesses equals no single answer.
    """
    label = str(sample.label)
    gold = parse(label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no answer in the label {label!r}; let labels hold the answer alone")
    last_box = max(sample.response.rfind("\\boxed"), 0)
    answer = parse(sample.response[last_box:], parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
