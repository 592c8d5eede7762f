"""Every file name of a run, as a property. Creates nothing unless a method says so.

What holds the profile's variables, which may be secrets, has mode 0600: profile.yaml, spec.json, and an attempt's
plan.json and environment.sh. No script does, since Slurm keeps those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def absolute_path(path: Path | str) -> Path:
    """Absolute, without ``.`` and ``..``, and the same place: behind a symlink ``..`` is not what the text says.

    Other symlinks stay as they were written. FileNotFoundError if a relative one starts in a deleted directory.
    """
    absolute = os.path.join(os.getcwd(), path) if not os.path.isabs(path) else str(path)
    short = os.path.normpath(absolute)
    real = os.path.realpath(absolute)
    return Path(short if os.path.realpath(short) == real else real)


def is_nowhere() -> bool:
    """Whether the working directory has been removed: it still is one to the kernel, but has no path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@dataclass(frozen=True)
class AttemptDir:
    """``attempts/NNNN``: one start of the run."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def owner(self) -> Path:
        """Created with O_EXCL by the supervisor that owns the run."""
        return self.path / "owner"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def script(self) -> Path:
        return self.path / "run.sbatch"

    @property
    def environment(self) -> Path:
        """The profile's variables, for the script to read; there only if it has any."""
        return self.path / "environment.sh"

    @property
    def submitit(self) -> Path:
        """submitit's own folder: pickles and the submission file it generated."""
        return self.path / "submitit"

    @property
    def allocation(self) -> Path:
        """Which nodes each component got; written by the supervisor."""
        return self.path / "allocation.json"

    @property
    def outcome(self) -> Path:
        """How the driver says it ended; absent if it was killed."""
        return self.path / "outcome.json"

    @property
    def ended(self) -> Path:
        """How the attempt ended; written last, by the supervisor."""
        return self.path / "ended.json"

    @property
    def cancel_marker(self) -> Path:
        """Left by ``slime-hpc cancel`` before it calls scancel."""
        return self.path / "cancel.json"

    @property
    def secrets(self) -> Path:
        """Directory of mode 0700: Ray token, engine keys, control token."""
        return self.path / "secrets"

    @property
    def ray_token(self) -> Path:
        return self.secrets / "ray_token"

    @property
    def control_token(self) -> Path:
        """Shared by supervisor, agents and driver for their TCP messages."""
        return self.secrets / "control_token"

    @property
    def engine_keys(self) -> Path:
        """JSON ``{"api_key": …, "admin_api_key": …}``."""
        return self.secrets / "engine_keys.json"

    @property
    def ray_head(self) -> Path:
        """JSON ``{"address": "host:port"}``, written by the head node's agent."""
        return self.path / "ray-head.json"

    @property
    def driver_control(self) -> Path:
        """JSON ``{"host", "port"}`` where the driver takes notices."""
        return self.path / "driver-control.json"

    def engine_args(self, index: int) -> Path:
        """JSON: one engine's SGLang server arguments. Holds no key."""
        return self.path / f"engine-{index}.json"

    @property
    def router_args(self) -> Path:
        """JSON: sglang-router's arguments. Holds no key."""
        return self.path / "router.json"

    @property
    def stop(self) -> Path:
        """Left by the supervisor when it ends the attempt, for agents that come up only then."""
        return self.path / "stop.json"

    def node(self, name: str) -> Path:
        """JSON an agent writes of its node: pids, ports, temp directory."""
        return self.path / f"node-{name}.json"

    def notice(self, node: str) -> Path:
        return self.path / f"notice-{node}.json"

    def events(self, who: str) -> Path:
        return self.path / f"events-{who}.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, who: str) -> Path:
        return self.logs / f"{who}.log"


@dataclass(frozen=True)
class RunDir:
    """One run, whatever number of jobs it takes."""

    path: Path

    @property
    def profile(self) -> Path:
        return self.path / "profile.yaml"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def submit(self) -> Path:
        """What was submitted: job id, token, time, tool version."""
        return self.path / "submit.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:04d}")

    def all_attempts(self) -> list[AttemptDir]:
        """Oldest first."""
        if not self.attempts.is_dir():
            return []
        found = [p for p in self.attempts.iterdir() if re.fullmatch(r"\d{4,}", p.name) and not p.is_symlink()]
        return [AttemptDir(p) for p in sorted(found, key=lambda p: int(p.name))]

    def slurm_output(self, job_id: str) -> Path:
        return self.path / f"slurm-{job_id}.out"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, round_: int, attempt: int) -> Path:
        return self.checkpoints / f"round_{round_:08d}.a{attempt:04d}"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollout(self, round_: int, attempt: int) -> Path:
        return self.rollouts / f"round_{round_:08d}.a{attempt:04d}.jsonl"

    def final_rollout(self, attempt: int) -> Path:
        """What the exported model answered, after the last round."""
        return self.rollouts / f"final.a{attempt:04d}.jsonl"

    def evaluation(self, name: str, rounds: int, attempt: int) -> Path:
        """What the policy answered to an evaluation set after so many rounds."""
        return self.rollouts / f"eval_{name}_{rounds:08d}.a{attempt:04d}.jsonl"

    @property
    def model(self) -> Path:
        """The exported HF model."""
        return self.path / "model"

    def model_of_round(self, round_: int) -> Path:
        """Where an older checkpoint is exported to, so that ``model`` stays what it is."""
        return self.path / f"model_round_{round_:08d}"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def all_events(self) -> Iterator[Path]:
        """The driver's file and everybody's files of every attempt."""
        yield self.events
        for attempt in self.all_attempts():
            yield from sorted(attempt.path.glob("events-*.jsonl"))

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def reward_curve(self) -> Path:
        return self.path / "reward.png"

    @property
    def report_page(self) -> Path:
        return self.path / "report.html"
