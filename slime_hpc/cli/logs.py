"""``slime-hpc logs``: what the processes of a run wrote."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_hpc.cli.arguments import RunArgument

if TYPE_CHECKING:
    from slime_hpc.run_dir import RunDir

POLL_S = 0.5


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
    from slime_hpc.run_dir import RunDir
    from slime_hpc.status import read_records

    records = read_records(RunDir(run.absolute()))
    path = _choose(_available(records.run), who)
    position = _print_tail(path, lines)
    if follow:
        _follow(path, position, records.run.attempt(records.plan.attempt).ended)


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


def _follow(path: Path, position: int, ended: Path) -> None:
    """Print what is added until the attempt has ended (or the user has seen enough)."""
    over = False
    while not over:
        over = ended.exists()  # asked before the last read, so that nothing written before the end is missed
        with open(path, "rb") as file:
            file.seek(position)
            text = file.read()
        position += len(text)
        typer.echo(text.decode(errors="replace"), nl=False)
        if not over:
            time.sleep(POLL_S)
