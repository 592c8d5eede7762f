"""``slime-hpc plan``: what a profile would run, without asking Slurm."""

from __future__ import annotations

import typer

from slime_hpc.cli.arguments import JsonOption, ProfileArgument, SetOption, load, print_json


def plan(ctx: typer.Context, profile: ProfileArgument, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a profile and show the job it asks for."""
    from slime_hpc.display import plan_report, print_report
    from slime_hpc.plan import new_plan, shown_plan
    from slime_hpc.render import render_script, supervisor_command

    planned = new_plan(load(profile, set_, ctx.args))
    render_script(planned, supervisor_command(planned))  # an sbatch option it cannot write is found here, too
    if as_json:
        print_json(shown_plan(planned))
    else:
        print_report(plan_report(planned))
