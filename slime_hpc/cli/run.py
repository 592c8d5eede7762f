"""``slime-hpc run``: the same loop here and now, without Slurm."""

from __future__ import annotations

import os

import typer

from slime_hpc.cli.arguments import ProfileArgument, SetOption, load


def run(ctx: typer.Context, profile: ProfileArgument, set_: SetOption = None) -> None:
    """Train on this host, without Slurm: all roles side by side, on loopback. Ctrl-C ends it cleanly.

    What a profile says of partitions, accounts, memory and time limits has no meaning here.
    """
    from slime_hpc.plan import one_host_plan
    from slime_hpc.run_dir import RunDir
    from slime_hpc.spec.check_one_host import check_one_host
    from slime_hpc.submit import begin_local_run
    from slime_hpc.supervisor.launch import LocalLauncher
    from slime_hpc.supervisor.main import run_attempt
    from slime_hpc.supervisor.signals import SignalInbox
    from slime_hpc.supervisor.sweep import adopt_orphans, end_descendants
    from slime_hpc.watch import choose_screen, watch_beside

    loaded = load(profile, set_, ctx.args)
    loaded.require_none(check_one_host(loaded.spec, loaded.cluster))
    plan = one_host_plan(loaded, len(os.sched_getaffinity(0)))
    begin_local_run(loaded, plan)
    inbox = SignalInbox.install()
    adopt_orphans()
    directory = RunDir(plan.run_dir)
    with watch_beside(directory, choose_screen()):
        try:
            ending = run_attempt(directory, plan.attempt, LocalLauncher(plan), inbox)
        finally:
            end_descendants(timeout_s=5.0)
    typer.echo(f"{ending.cause}: {ending.detail}")
    if ending.cause != "finished":
        raise typer.Exit(3)
