"""Which variables of a profile are not for anybody's eyes, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """``HF_TOKEN``, ``WANDB_API_KEY``, …: rather one too many, since a mask does no harm."""
    return _SECRET.search(name) is not None


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """For showing."""
    return {name: MASK if is_secret(name) else value for name, value in variables.items()}


def masked_setting(text: str) -> str:
    """``--set``'s text for showing: a value that may be, or hold, a secret is left out."""
    key = text.partition("=")[0]
    path = key.split(".")
    plain = len(path) > 2 and not is_secret(path[2])
    hidden = path[0] == "environment" and path[1:2] in ([], ["variables"]) and not plain
    return f"{key}={MASK}" if hidden or path[-1].endswith("api_key") else text


def written_secrets(lines: Iterable[str]) -> list[str]:
    """Names of those that shell lines set to a value which stands there, rather than to ``$(cat FILE)``."""
    found = (name for line in lines for name in re.findall(r"\b(\w+)=(?![\"']?[$`])[^\s]", line))
    return [name for name in found if is_secret(name)]
