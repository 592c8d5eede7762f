"""The runs under some directories, and how each stands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_hpc.errors import SlimeHpcError, UserError
from slime_hpc.facts import JobFacts, Records, is_local, query_jobs, read_records
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.status import State, Verdict, join_status

LEVELS = 4
"""How far below a directory runs are looked for."""


@dataclass(frozen=True)
class ListedRun:
    """One line of ``slime-hpc list``; ``--json`` prints exactly these fields."""

    name: str
    state: State
    verdict: Verdict
    round: int | None
    """The last that was trained, counted from 0."""
    num_rollout: int
    reward: float | None
    job_id: str | None
    last_heard: float | None
    """Unix seconds: when it was submitted, started, trained a round, beat or ended, whatever was last."""
    run_dir: str


@dataclass(frozen=True)
class Listing:
    """What was found."""

    runs: tuple[ListedRun, ...]
    """Most recently heard of first."""
    unreadable: dict[str, str]
    """Why, by path: directories that could not be looked into, runs whose records are damaged."""
    slurm_problem: str | None
    """Why Slurm could not be asked."""


def load_listing(directories: Iterable[Path], slurm: Slurm) -> Listing:
    """Find the runs, ask Slurm once about all of them, join. UserError where one of ``directories`` is none."""
    unreadable: dict[str, str] = {}
    found: dict[Path, Records] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; name one that holds runs")
        for run in find_runs(Path(os.path.abspath(directory)), unreadable):
            try:
                found[run.path] = read_records(run)
            except (SlimeHpcError, OSError, ValueError, KeyError) as e:
                unreadable[str(run.path)] = f"its records cannot be read: {e}"  # the other runs are still to be shown
    facts = query_jobs(list(found.values()), slurm, ended_too=False)
    runs = [_listed(records, job) for records, job in zip(found.values(), facts, strict=True)]
    problems = [job.problem for records, job in zip(found.values(), facts, strict=True) if not is_local(records)]
    newest_first = sorted(runs, key=lambda run: run.last_heard or 0.0, reverse=True)
    return Listing(tuple(newest_first), unreadable, next(filter(None, problems), None))


def find_runs(directory: Path, unreadable: dict[str, str], levels: int = LEVELS) -> Iterator[RunDir]:
    """Itself if it is a run, else those below it. Enters no link, no hidden directory, and nothing inside a run."""
    run = RunDir(directory)
    try:
        with os.scandir(directory) as entries:
            below = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
        is_run = run.attempts.name in below and any(attempt.plan.exists() for attempt in run.all_attempts())
    except OSError as e:
        unreadable[str(directory)] = str(e.strerror)
        return
    if is_run:
        yield run
    elif levels:
        for name in sorted(below):
            yield from find_runs(directory / name, unreadable, levels - 1)


def _listed(records: Records, job: JobFacts) -> ListedRun:
    status = join_status(records, job, time.time())
    return ListedRun(
        name=status.name,
        state=status.state,
        verdict=status.verdict,
        round=status.round,
        num_rollout=status.num_rollout,
        reward=status.reward,
        job_id=status.attempts[-1].job_id,
        last_heard=_last_heard(records),
        run_dir=status.run_dir,
    )


def _last_heard(records: Records) -> float | None:
    signs = [
        (records.submitted or {}).get("submitted"),
        (records.heartbeat or {}).get("time"),
        (records.last_round or {}).get("time"),
        *(owner.get("started") for owner in records.owners.values()),
        *(ended.get("ended") for ended in records.ended.values()),
    ]
    return max((sign for sign in signs if sign is not None), default=None)
