"""``slime-hpc report``: what came of a run."""

from __future__ import annotations

import dataclasses

from slime_hpc.cli.arguments import JsonOption, RunArgument, print_json, run_directory


def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show what came of a run: rounds, rewards, the model, and a picture of the reward."""
    from slime_hpc.display import data_tables, print_report, run_report
    from slime_hpc.report import draw_reward_curve, load_evaluations, load_prompt_counts, load_rounds, summarise
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.status import load_status

    directory = run_directory(run)
    status = load_status(directory, SlurmCli())
    rounds = load_rounds(directory)
    draw_reward_curve(directory, rounds)
    model = directory.model if directory.model.is_dir() else None
    prompts = load_prompt_counts(directory)
    evaluations = [dataclasses.asdict(evaluation) for evaluation in load_evaluations(directory)]
    if as_json:
        found = {"rounds": rounds, "prompts": prompts, "evaluations": evaluations}
        paths = {"reward_curve": str(directory.reward_curve), "model": model and str(model)}
        print_json({"status": dataclasses.asdict(status), **found, **paths})
    else:
        data = data_tables(prompts, evaluations)
        print_report(run_report(status, summarise(rounds), data, directory.reward_curve, model))
