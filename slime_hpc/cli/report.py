"""``slime-hpc report``: what came of a run."""

from __future__ import annotations

import dataclasses

from slime_hpc.cli.arguments import JsonOption, RunArgument, print_json


def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show what came of a run: rounds, rewards, the model, and a picture of the reward."""
    from slime_hpc.display import print_report, run_report
    from slime_hpc.report import draw_reward_curve, load_rounds, summarise
    from slime_hpc.run_dir import RunDir
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.status import load_status

    directory = RunDir(run.absolute())
    status = load_status(directory, SlurmCli())
    rounds = load_rounds(directory)
    draw_reward_curve(directory, rounds)
    model = directory.model if directory.model.is_dir() else None
    if as_json:
        paths = {"reward_curve": str(directory.reward_curve), "model": model and str(model)}
        print_json({"status": dataclasses.asdict(status), "rounds": rounds, **paths})
    else:
        print_report(run_report(status, summarise(rounds), directory.reward_curve, model))
