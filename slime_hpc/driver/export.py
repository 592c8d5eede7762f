"""``python -m slime_hpc.driver.export RUN_DIR``: what ``slime-hpc export`` starts where the engines are."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from slime_hpc.errors import ClusterError, SlimeHpcError, UserError
from slime_hpc.run_dir import RunDir

if TYPE_CHECKING:
    from slime_hpc.checkpoint import Checkpoint


def export(run: RunDir, round_: int | None, output: Path | None) -> dict[str, object]:
    """Export one checkpoint; returns what ``--json`` prints. UserError where there is none, or no place for it."""
    from slime_hpc.checkpoint import verify
    from slime_hpc.plan import read_plan
    from slime_hpc.trainer.export import export_checkpoint
    from slime_hpc.trainer.ranks import ORIGIN

    checkpoint = choose(run, round_)
    directory = output or (run.model if round_ is None else run.model_of_round(round_))
    if output is not None:
        require_ours(directory, ORIGIN)
    verify(checkpoint)
    manifest = checkpoint.manifest
    plan = read_plan(run.attempt(manifest.attempt).plan)
    if not plan.spec.model.hf_checkpoint.is_dir():
        raise UserError(f"{plan.spec.model.hf_checkpoint}, whose config and tokenizer the model takes, is not there")
    origin = {
        "run_dir": str(run.path),
        "attempt": manifest.attempt,
        "round": manifest.round,
        "step": manifest.step,
        "checkpoint": str(checkpoint.path),
        "tool_version": manifest.tool_version,
    }
    export_checkpoint(plan, checkpoint.path, directory, origin)
    return {**origin, "model": str(directory)}


def choose(run: RunDir, round_: int | None) -> Checkpoint:
    """The newest complete checkpoint, or the newest of a round."""
    from slime_hpc.checkpoint import complete_checkpoints

    found = complete_checkpoints(run)
    if not found:
        raise UserError(f"{run.path} has no complete checkpoint yet; `slime-hpc status` tells how far the run is")
    if round_ is None:
        return found[-1]
    of_round = [checkpoint for checkpoint in found if checkpoint.manifest.round == round_]
    if not of_round:
        there = ", ".join(str(number) for number in sorted({checkpoint.manifest.round for checkpoint in found}))
        raise UserError(f"there is no complete checkpoint of round {round_} in {run.checkpoints}; of rounds: {there}")
    return of_round[-1]


def require_ours(directory: Path, mark: str) -> None:
    """UserError where something is in the way that no earlier export has put there."""
    if not directory.exists() or (directory / mark).is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise UserError(f"{directory} is there already, and no export of slime-hpc; choose another -o, or remove it")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slime-hpc export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--round", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # megatron-core's, of options that this one process does not use
    try:
        done = export(RunDir(options.run_dir), options.round, options.output)
    except ModuleNotFoundError as error:
        print(
            f"error: {sys.executable} has no module {error.name}: exporting needs the engines; do it where the run's "
            "environment is, such as in a job",
            file=sys.stderr,
        )
        return UserError.exit_code
    except SlimeHpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or options.output or options.run_dir}: {error.strerror}", file=sys.stderr)
        return ClusterError.exit_code
    said = json.dumps(done, indent=2) if options.json else f"round {done['round']} exported to {done['model']}"
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
