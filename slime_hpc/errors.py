"""Every exception a user can meet.

    SlimeHpcError              exit code
    ├── UserError              2   something the user wrote or asked for
    │   └── ProfileError       2   one or more findings in a profile, with file:line
    ├── ClusterError           1   Slurm, a node or a file system said no
    │   ├── SlurmCommandError  1   a Slurm command failed; its words are quoted whole
    │   └── DeadlineExceeded   1   a wait ran out; the message names what was missing
    └── RunFailed              3   the run ended in failure

Only ``slime_hpc.cli`` catches them, and prints no traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SlimeHpcError(Exception):
    """Root of the tree. The message names the value, the rule and the next step."""

    exit_code = 1


class UserError(SlimeHpcError):
    exit_code = 2


class ClusterError(SlimeHpcError):
    exit_code = 1


class RunFailed(SlimeHpcError):
    exit_code = 3


class DeadlineExceeded(ClusterError):
    """A bounded wait ran out; the message says what was waited for and what is missing."""


class SlurmCommandError(ClusterError):
    """A Slurm command exited non-zero.

    ``command`` is the argument vector, ``stderr`` what Slurm said, unabridged.
    """

    def __init__(self, command: Sequence[str], returncode: int, stderr: str) -> None:
        self.command = tuple(command)
        self.returncode = returncode
        self.stderr = stderr.strip()
        super().__init__(f"{command[0]} failed (exit {returncode}): {self.stderr or 'it printed nothing'}")


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a profile: where it stands, and what to do about it."""

    path: str
    """Dotted path of the key, e.g. ``trainer.gpus_per_node``; empty for the whole file."""
    message: str
    """Value, rule and next step in one sentence."""
    where: str = ""
    """``file:line``, or the command-line option it came from."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.message) if part)


class ProfileError(UserError):
    """A profile was refused; ``findings`` holds every reason, not just the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(str(f) for f in findings))
