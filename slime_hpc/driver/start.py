"""Where an attempt goes on: at the newest sound checkpoint, or at the start of a run that has none to lose."""

from __future__ import annotations

from slime_hpc.checkpoint import Checkpoint, may_begin_anew, newest_sound
from slime_hpc.driver.deadline import say
from slime_hpc.errors import UserError
from slime_hpc.records import EventLog, read_rounds, surviving_rounds
from slime_hpc.run_dir import RunDir


def find_start(run: RunDir, log: EventLog, interval: int | None) -> Checkpoint | None:
    """What to load; None at the very start. UserError where rounds were trained, and nothing to load is left."""
    say("looking for the newest checkpoint, and reading all of it")
    checkpoint = newest_sound(run, log)
    trained = surviving_rounds(read_rounds(run.metrics))
    if checkpoint is None and trained and may_begin_anew(run, trained, interval):
        log("begins_anew", lost=len(trained))
        say(f"begins anew: {len(trained)} round(s) were trained, and the first checkpoint was not yet written")
    elif checkpoint is None and trained:
        raise UserError(
            f"rounds {trained[0]['round']}-{trained[-1]['round']} were trained, but no complete checkpoint is in "
            f"{run.checkpoints}: what was learned is lost, and a run does not begin anew by itself. Look there for what"
            " was set aside, or submit to another run_dir, with a smaller checkpoint.interval"
        )
    if checkpoint is not None:
        log("resumes", round=first_round(checkpoint), path=str(checkpoint.path), lost=_lost(trained, checkpoint))
    return checkpoint


def first_round(checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.manifest.round + 1


def _lost(trained: list[dict[str, int]], checkpoint: Checkpoint) -> int:
    """Rounds that were trained after it, and will be again."""
    return sum(row["round"] > checkpoint.manifest.round for row in trained)
