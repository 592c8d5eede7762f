"""Arguments that several commands take, and what they are turned into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_hpc.errors import UserError

if TYPE_CHECKING:
    from slime_hpc.spec.load import Profile

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="The profile. Megatron and --sglang-… options may follow it.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set num_rollout=100")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory: run_dir in its profile.")]


def load(profile: Path, sets: Sequence[str] | None, flags: Sequence[str]) -> Profile:
    """A checked profile; ProfileError with everything that is wrong."""
    from slime_hpc.spec.load import load_profile

    if str(profile).startswith("--"):
        raise UserError(f"{profile}: options of Megatron and SGLang stand after the profile")
    return load_profile(profile, sets=sets or (), flags=flags)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
