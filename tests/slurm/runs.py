"""Runs for tests: submit the quickstart as a user does, follow it by its files, look for what it leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from devclusters import RunningDevCluster

from slime_hpc.records import read_json, read_jsonl
from slime_hpc.run_dir import AttemptDir, RunDir

EXAMPLES = Path(__file__).parents[2] / "examples"
T = TypeVar("T")


def slime_hpc(*arguments: object) -> str:
    """Standard output of one command."""
    command = [sys.executable, "-c", "from slime_hpc.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(look: Callable[[], T | None], timeout_s: float, what: str) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.2)
    return found


def tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@dataclass(frozen=True)
class TestRun:
    """One submitted quickstart."""

    __test__ = False
    dir: RunDir
    job_id: str
    cluster: RunningDevCluster
    before: frozenset[int]
    """Processes on the cluster's nodes when the run was submitted."""
    number: int = 1
    """Of the attempt that is looked at."""

    @property
    def attempt(self) -> AttemptDir:
        return self.dir.attempt(self.number)

    def rounds(self) -> list[dict[str, Any]]:
        """Of all attempts."""
        return list(read_jsonl(self.dir.metrics))

    def own_rounds(self) -> list[dict[str, Any]]:
        return [row for row in self.rounds() if row["attempt"] == self.number]

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        rows = [row for path in self.dir.all_events() for row in read_jsonl(path)]
        return [row for row in rows if name in (None, row["event"])]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(slime_hpc("status", self.dir.path, "--json"))
        return status

    def wait_until(self, happened: Callable[[], bool], what: str, timeout_s: float = 240) -> None:
        """The attempt must not end before."""

        def look() -> bool:
            ended = self.attempt.ended
            assert not ended.exists(), f"attempt {self.number} ended early: {self.last_words()}"
            return happened()

        wait_for(look, timeout_s, what)

    def wait_for_end(self, timeout_s: float) -> dict[str, Any]:
        """``ended.json``."""
        wait_for(self.attempt.ended.exists, timeout_s, f"the end of {self.dir.path}")
        ended: dict[str, Any] = read_json(self.attempt.ended)
        return ended

    def require_finished(self, timeout_s: float) -> None:
        assert self.wait_for_end(timeout_s)["cause"] == "finished", self.last_words()

    def last_words(self) -> str:
        """How the attempt ended, and the end of each of its logs."""
        logs = [f"--- {path.name}\n{tail(path)}" for path in sorted(self.attempt.logs.iterdir())]
        return "\n".join([self.attempt.ended.read_text(encoding="utf-8"), *logs])

    def leftovers(self) -> list[str]:
        """What is on the cluster's nodes that was not before, after a grace for Slurm to collect its own processes."""

        def left() -> list[str]:
            new = {pid: line for pid, line in self.cluster.traces().processes().items() if pid not in self.before}
            return [*new.values(), *map(str, self.scratch())]

        deadline = time.monotonic() + 5
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def scratch(self) -> list[Path]:
        """Temporary directories of the attempt's nodes, by the event that names them."""
        rows = [row for row in self.events("raylet_up") if row["attempt"] == self.number]
        return [path for row in rows if (path := Path(row["temp_dir"])).exists()]


def submit_quickstart(cluster: RunningDevCluster, directory: Path, model: Path, **settings: object) -> TestRun:
    return submit_example("quickstart", cluster, directory, model, **settings)


def submit_example(name: str, cluster: RunningDevCluster, directory: Path, model: Path, **settings: object) -> TestRun:
    """A copy of an example, with keys of its profile set."""
    profile_dir = directory / name
    shutil.copytree(EXAMPLES / name, profile_dir, ignore=shutil.ignore_patterns("model", "__pycache__"))
    run_dir = directory / "run"
    sets = {"run_dir": run_dir, "model.hf_checkpoint": model, **settings}
    options = [f"--set={key}={value}" for key, value in sets.items()]
    before = frozenset(cluster.traces().processes())
    record = json.loads(slime_hpc("submit", profile_dir / "profile.yaml", "--json", *options))
    return TestRun(RunDir(run_dir), record["job_id"], cluster, before)
