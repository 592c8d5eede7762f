"""``--watch`` of several commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

INTERRUPTED = 130
"""What a shell gives for Ctrl-C: 128 + SIGINT."""


def watch_to_the_end(run_dir: str) -> None:
    """Show a run until it has ended. Exits with 3 if it did not finish; Ctrl-C leaves it running."""
    from slime_hpc.display import print_report, status_report
    from slime_hpc.run_dir import RunDir
    from slime_hpc.slurm.commands import SlurmCli
    from slime_hpc.watch import choose_screen, watch

    try:
        report = watch(RunDir(Path(run_dir)), SlurmCli(), choose_screen())
    except KeyboardInterrupt:
        typer.echo(f"\nthe run goes on; to look again: slime-hpc status --watch {shlex.quote(run_dir)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    print_report(status_report(report))
    if report.verdict != "finished":
        raise typer.Exit(3)
