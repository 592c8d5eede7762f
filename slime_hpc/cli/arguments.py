"""Arguments that several commands take, and what they are turned into."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_hpc.errors import UserError

if TYPE_CHECKING:
    from slime_hpc.run_dir import RunDir
    from slime_hpc.spec.load import Profile

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="The profile. Megatron and --sglang-… options may follow it.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set num_rollout=100")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SHOWN = 8
"""Variables to name: an enclosing job has some fifty, a user's own defaults come first."""
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory: run_dir in its profile.")]


def load(profile: Path, sets: Sequence[str] | None, flags: Sequence[str]) -> Profile:
    """A checked profile; ProfileError with everything that is wrong."""
    from slime_hpc.spec.load import load_profile

    if str(profile).startswith("--"):
        raise UserError(f"{profile}: options of Megatron and SGLang stand after the profile")
    return load_profile(profile, sets=sets or (), flags=flags)


def run_directory(run: Path) -> RunDir:
    """The run that is meant, wherever the command was typed."""
    from slime_hpc.run_dir import RunDir, absolute_path

    return RunDir(absolute_path(run))


def name_what_is_left_out() -> None:
    """Tell which variables of this shell a job will not have, if any."""
    from slime_hpc.slurm.commands import dropped_variables

    dropped = sorted(dropped_variables(os.environ), key=lambda name: not name.startswith("SBATCH_"))
    if not dropped:
        return
    more = f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else ""
    job_id = os.environ.get("SLURM_JOB_ID")
    reason = f" (this shell is inside job {job_id})" if job_id else ""
    typer.echo(f"left out of the job's environment: {', '.join(dropped[:SHOWN])}{more}{reason}", err=True)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
