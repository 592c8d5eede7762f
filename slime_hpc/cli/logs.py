"""``slime-hpc logs``: what the processes of a run wrote."""

from __future__ import annotations

import collections
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_hpc.cli.arguments import RunArgument, run_directory

if TYPE_CHECKING:
    from slime_hpc.run_dir import RunDir

POLL_S = 0.5
ASK_SLURM_EVERY_S = 30.0


def logs(
    run: RunArgument,
    who: Annotated[
        str | None, typer.Argument(metavar="[WHO]", help="driver, trainer-0, engine-0, agent-NODE, slurm, …")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the attempt ends.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Show the end of one of a run's logs.

    The newest attempt's; left out, WHO is the driver, or Slurm's own output where there is no driver yet.
    """
    from slime_hpc.facts import read_records

    records = read_records(run_directory(run))
    over = _Over(records.run, records.plan.attempt)
    if follow:
        _await_log(records.run, who or "driver", over)
    path = _choose(_available(records.run), who)
    position = _print_tail(path, lines)
    if follow:
        _follow(path, position, over)


class _Over:
    """Whether an attempt has ended: by its own record, or, asked now and then, by Slurm's."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._ended = run.attempt(attempt).ended
        self._asked = time.monotonic()

    def __call__(self) -> bool:
        if self._ended.exists():
            return True
        if time.monotonic() - self._asked < ASK_SLURM_EVERY_S:
            return False
        from slime_hpc.slurm.commands import SlurmCli
        from slime_hpc.status import load_status

        self._asked = time.monotonic()
        return load_status(self._run, SlurmCli()).state == "ended"


def _await_log(run: RunDir, who: str, over: _Over) -> None:
    """Until that log is there, or never will be: a job may wait in the queue for days."""
    _require_known(who)
    if who not in _available(run):
        typer.echo(f"waiting for the job to start and write its {who} log …", err=True)
    while who not in _available(run) and not over():
        time.sleep(POLL_S)


def _require_known(who: str) -> None:
    """UserError for a name that no log will ever have: nobody waits for a misspelt one."""
    from slime_hpc.errors import UserError
    from slime_hpc.spec.explain import did_you_mean

    if not re.fullmatch(r"driver|supervisor|router|slurm|(trainer|engine|engine-actor)-\d+|(agent|step|ray)-.+", who):
        kinds = ("driver", "supervisor", "router", "slurm", "trainer-0", "engine-0", "agent-NODE", "ray-NODE")
        raise UserError(f"no log is named {who!r}{did_you_mean(who, kinds)}")


def _available(run: RunDir) -> dict[str, Path]:
    """Logs by the name to ask for them."""
    found = {path.stem: path for path in sorted(run.all_attempts()[-1].logs.glob("*.log"))}
    outputs = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    return found | ({"slurm": outputs[-1]} if outputs else {})


def _choose(available: dict[str, Path], who: str | None) -> Path:
    from slime_hpc.errors import UserError
    from slime_hpc.spec.explain import did_you_mean

    if not available:
        raise UserError("there are no logs yet; `slime-hpc status` tells whether the job has started")
    if who is None:
        path = available.get("driver") or available.get("slurm") or next(iter(available.values()))
        typer.echo(f"{path} (others: {', '.join(name for name in available if available[name] != path)})", err=True)
        return path
    if who not in available:
        raise UserError(f"there is no log of {who!r}{did_you_mean(who, available)} (there are {', '.join(available)})")
    return available[who]


def _print_tail(path: Path, lines: int) -> int:
    """Print the last lines; returns where the file ended."""
    with open(path, "rb") as file:
        tail = collections.deque(file, maxlen=lines)
        position = file.tell()
    typer.echo(b"".join(tail).decode(errors="replace"), nl=False)
    return position


def _follow(path: Path, position: int, over: _Over) -> None:
    """Print what is added until the attempt has ended (or the user has seen enough)."""
    ended = False
    while not ended:
        ended = over()  # asked before the last read, so that nothing written before the end is missed
        with open(path, "rb") as file:
            file.seek(position)
            text = file.read()
        position += len(text)
        typer.echo(text.decode(errors="replace"), nl=False)
        if not ended:
            time.sleep(POLL_S)
