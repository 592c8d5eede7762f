"""``slime-hpc``: one file per command. What a command needs it imports when it runs, so that --help is quick."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from slime_hpc import __version__
from slime_hpc.cli import cancel, devcluster, export, init, logs, plan, render, report, resume, run, status, submit
from slime_hpc.cli import list as listing
from slime_hpc.errors import ProfileError, SlimeHpcError
from slime_hpc.records import restrict_umask
from slime_hpc.run_dir import is_nowhere

TRAILING = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that take Megatron and SGLang options after the profile."""

app = typer.Typer(
    name="slime-hpc",
    help="Reinforcement-learning post-training of language models on Slurm supercomputers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init")(init.init)
app.command("plan", context_settings=TRAILING)(plan.plan)
app.command("render", context_settings=TRAILING)(render.render)
app.command("submit", context_settings=TRAILING)(submit.submit)
app.command("run", context_settings=TRAILING)(run.run)
app.command("status")(status.status)
app.command("list")(listing.list_)
app.command("logs")(logs.logs)
app.command("report")(report.report)
app.command("resume", context_settings=TRAILING)(resume.resume)
app.command("export")(export.export)
app.command("cancel")(cancel.cancel)
app.add_typer(devcluster.app, name="devcluster")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slime-hpc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The one place that catches our exceptions: their message, their exit code, no traceback."""
    restrict_umask()
    _print_what_the_terminal_can()
    try:
        app(arguments)
    except SlimeHpcError as e:
        _fail(_message(e), e.exit_code)
    except OSError as e:
        _fail(_reason(e), 1)
    except Exception as e:
        if os.environ.get("SLIME_HPC_DEBUG"):
            raise
        _fail(f"a bug in slime-hpc: {type(e).__name__}: {e}\nSLIME_HPC_DEBUG=1 shows where; please report it", 1)
    sys.exit(0)


def _print_what_the_terminal_can() -> None:
    """In a locale without the characters of a path or a message, show their numbers: printing must not fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _message(error: SlimeHpcError) -> str:
    if isinstance(error, ProfileError) and len(error.findings) > 1:
        return f"{len(error.findings)} things to mend:\n" + "\n".join(f"  {finding}" for finding in error.findings)
    return str(error)


def _reason(error: OSError) -> str:
    if error.filename is None and isinstance(error, FileNotFoundError) and is_nowhere():
        return "the directory this shell is in has been removed; cd to another, or give whole paths"
    return f"{error.filename or 'input or output'}: {error.strerror}"


def _fail(message: str, exit_code: int) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo(message, err=True)
    sys.exit(exit_code)
