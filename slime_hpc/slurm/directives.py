"""``#SBATCH`` lines of a heterogeneous job. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from slime_hpc.errors import UserError

Options = Mapping[str, str | int | bool]
"""sbatch options by long name, ``-`` or ``_`` in it; True is a bare flag, False leaves it out."""

_ORDER = (
    "job-name", "partition", "account", "qos", "reservation", "constraint", "nodes", "ntasks", "ntasks-per-node",
    "gpus", "gpus-per-node", "gres", "cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "time", "time-min",
)  # fmt: skip
"""What a reader looks for first; the rest follows by name."""

_OURS = {
    "array", "comment", "error", "hetjob", "job-name", "no-requeue", "open-mode", "output", "quiet", "requeue",
    "test-only", "wait", "wrap",
}  # fmt: skip
"""Set by the caller for the whole job, or change what sbatch does or answers."""

_FORGOTTEN = {
    "bb", "bbf", "constraint", "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "distribution", "exclusive", "extra-node-info", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "job-name", "licenses", "mail-type", "mail-user",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "overcommit", "oversubscribe",
    "partition", "power", "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "tmp",
    "use-min-nodes",
}  # fmt: skip
"""sbatch starts each component without these. Every other option is carried over from the one before.

Source: ``sbatch -vvv --test-only`` of Slurm 22.05, option by option. ``job-name`` is carried, but always set here.
"""

_WHOLE_JOB = {
    "begin", "chdir", "clusters", "deadline", "dependency", "export", "export-file", "get-user-env", "hold",
    "ignore-pbs", "input", "kill-on-invalid-dep", "mcs-label", "no-kill", "propagate", "signal", "verbose",
    "wait-all-nodes", "wckey",
}  # fmt: skip
"""Carried over, and rightly so: they say something about the job, not about a component."""

_NEUTRAL: Options = {"exclude": "", "hint": "", "nice": 0, "reservation": ""}
"""Carried over, with a value that undoes it."""


def sbatch_directives(
    components: Sequence[Options],
    *,
    name: str,
    output: str,
    error: str | None = None,
    comment: str | None = None,
    common: Options | None = None,
    requeue: bool = False,
) -> list[str]:
    """The lines between ``#!/bin/bash`` and the first command.

    Every component carries every option itself, under a job name of its own: with equal names
    ``--dependency=singleton`` would make it wait for itself (Slurm before 23.02). ``output``, ``error`` (patterns, as
    Slurm reads them), ``comment``, ``common`` and ``requeue`` (may Slurm start the job again?) are the whole job's
    and stand in the leader's block.
    UserError for an option that is not the profile's to set, or that would leak from one component into the next.
    """
    blocks = [_normalised(options, index) for index, options in enumerate(components)]
    blocks = [_shielded(blocks, index) for index in range(len(blocks))]
    job: dict[str, str | int | bool] = {
        "output": output,
        "open-mode": "append",
        "requeue" if requeue else "no-requeue": True,
    }
    job |= {"error": error} if error else {}
    job |= {"comment": comment} if comment else {}
    job |= common or {}
    lines: list[str] = []
    for index, block in enumerate(blocks):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [*_lines({"job-name": _component_name(name, index), **block}), *(_lines(job) if index == 0 else [])]
    return lines


def _component_name(name: str, index: int) -> str:
    """``run``, ``run-rollout``, ``run-rollout-2``."""
    return (name, f"{name}-rollout")[index] if index < 2 else f"{name}-rollout-{index}"


def _normalised(options: Options, index: int) -> dict[str, str | int | bool]:
    """Long names with hyphens, flags that are off left out."""
    block: dict[str, str | int | bool] = {}
    for key, value in options.items():
        option = key.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z-]+", option):
            raise UserError(f"component {index}: {key!r} is not the long name of an sbatch option; write e.g. nodelist")
        if option in _OURS:
            raise UserError(f"component {index}: --{option} is set by slime-hpc for the whole job; leave it out")
        if option in block:
            raise UserError(f"component {index}: --{option} is given twice, with - and with _; keep one")
        if value is not False:
            block[option] = value
    return block


def _shielded(blocks: Sequence[Options], index: int) -> dict[str, str | int | bool]:
    """One block, with what earlier ones would leak into it undone."""
    block = dict(blocks[index])
    earlier = {option: value for previous in blocks[:index] for option, value in previous.items()}
    for option in sorted(earlier.keys() - block.keys() - _FORGOTTEN - _WHOLE_JOB):
        if option not in _NEUTRAL:
            raise UserError(
                f"component {index} leaves --{option} unset, but sbatch would carry {earlier[option]!r} over from the "
                f"component before it, and knows no value to undo that; set {option} for every component or for none"
            )
        block[option] = _NEUTRAL[option]
    return block


def _lines(options: Options) -> list[str]:
    rank = {option: position for position, option in enumerate(_ORDER)}
    ordered = sorted(options, key=lambda option: (rank.get(option, len(rank)), option))
    return [_line(option, options[option]) for option in ordered]


def _line(option: str, value: str | int | bool) -> str:
    if value is True:
        return f"#SBATCH --{option}"
    text = str(value)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"--{option}={text!r} holds a control character, which an #SBATCH line cannot; leave it out")
    escaped = text.replace("\\", "\\\\")  # sbatch, unlike a shell, reads backslashes inside single quotes too
    return f"#SBATCH --{option}={shlex.quote(escaped) if text else ''}"
