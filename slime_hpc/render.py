"""JobPlan → the whole text of its batch script, and the file of variables beside it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from slime_hpc.plan import JobPlan
from slime_hpc.records import write_text_atomic
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.directives import sbatch_directives

TEMPLATE = Path(__file__).with_name("run.sbatch.j2")


def render_script(plan: JobPlan, command: str) -> str:
    """The script that ends with ``command``; UserError where an sbatch option cannot be written.

    The command becomes the supervisor: submitit's entry, or ``supervisor_command`` where submitted by hand.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        plan=plan, directives=_directives(plan), environment_file=_environment_file(plan), command=command
    )


def supervisor_command(plan: JobPlan) -> str:
    """What the batch shell becomes when there is no submitit."""
    return "exec " + shlex.join([plan.python, "-m", "slime_hpc.supervisor", str(plan.run_dir)])


def in_environment(plan: JobPlan, command: Sequence[str]) -> list[str]:
    """The command in the environment that the script would set up, for a start without Slurm.

    What setup lines print goes to standard error: standard output is the command's.
    """
    lines = [*plan.setup, *([f". {shlex.quote(str(_environment_file(plan)))} || exit 2"] if plan.variables else [])]
    if not lines:
        return list(command)
    return ["bash", "-c", "\n".join(["exec 3>&1 1>&2", *lines, 'exec "$@" 1>&3 3>&-']), "bash", *command]


def write_environment(plan: JobPlan, path: Path) -> None:
    """The file that the script reads the profile's variables from, if it has any.

    Not in the script: Slurm keeps that on its disks, where others can read it (``scontrol write batch_script``,
    ``sacct --batch-script``), and refuses one with a carriage return.
    """
    if plan.variables:
        lines = (f"export {name}={shlex.quote(value)}\n" for name, value in plan.variables.items())
        write_text_atomic(path, "".join(lines), mode=0o600)


def _environment_file(plan: JobPlan) -> Path:
    return RunDir(plan.run_dir).attempt(plan.attempt).environment


def _directives(plan: JobPlan) -> list[str]:
    return sbatch_directives(
        [component.options for component in plan.components],
        name=plan.spec.name,
        output=str(RunDir(plan.run_dir).slurm_output("%j")),
        comment=plan.token,
        requeue=True,
    )
