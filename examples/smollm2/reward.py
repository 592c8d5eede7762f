"""Exact match, with nothing in between."""

import re
from typing import Any

NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 if the reply's last number is the label and the model itself ended the reply, else 0.

    Credit for a number that merely occurs in the reply teaches the model to list guesses until it is cut off.
    """
    numbers = NUMBER.findall(sample.response)
    return float(sample.status == "completed" and numbers[-1:] == [sample.label])
