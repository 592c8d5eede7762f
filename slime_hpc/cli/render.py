"""``slime-hpc render``: the batch script of a profile, for reading or for plain sbatch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from slime_hpc.cli.arguments import ProfileArgument, SetOption, load


def render(
    ctx: typer.Context,
    profile: ProfileArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write run.sbatch and plan.json there.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Show a profile's batch script, or write it."""
    from slime_hpc.plan import new_plan
    from slime_hpc.records import write_text_atomic
    from slime_hpc.render import render_script, supervisor_command, write_environment
    from slime_hpc.run_dir import RunDir, absolute_path

    plan = new_plan(load(profile, set_, ctx.args))
    script = render_script(plan, supervisor_command(plan))
    if output is None:
        typer.echo(script, nl=False)
        return
    output.mkdir(parents=True, exist_ok=True)
    write_text_atomic(output / "run.sbatch", script)
    write_text_atomic(output / "plan.json", plan.model_dump_json(indent=2) + "\n", mode=0o600)
    write_environment(plan, output / "environment.sh")
    attempt = RunDir(plan.run_dir).attempt(plan.attempt)
    q = shlex.join
    made = (["mkdir", "-p", "-m", "700", str(plan.run_dir)], ["mkdir", "-p", str(attempt.logs)])
    output = absolute_path(output)
    needed = [str(output / path.name) for path in (attempt.plan, attempt.environment) if (output / path.name).exists()]
    typer.echo(
        f"wrote run.sbatch and what it needs into {output}. To submit by hand, from anywhere:\n"
        f"  {q(made[0])} && {q(made[1])} && {q(['mkdir', '-m', '700', str(attempt.secrets)])}\n"
        f"  {q(['cp', *needed, str(attempt.path)])}\n"
        f"  {q(['sbatch', str(output / 'run.sbatch')])}"
    )
