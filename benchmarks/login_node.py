"""What a user waits for at the login node: render, submit, status. Needs a Slurm, such as the devcluster's.

eval "$(slime-hpc devcluster env)"
python -m benchmarks.login_node
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.pairs import Pairs, alternate, table
from slime_hpc.driver.record import rollout_metrics
from slime_hpc.plan import new_plan
from slime_hpc.records import append_jsonl, read_json
from slime_hpc.render import render_script, supervisor_command
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.testing.tiny_model import make_tiny_qwen3
from slime_hpc.types import Sample, SampleStatus

PROFILE = Path(__file__).parents[1] / "examples" / "quickstart" / "profile.yaml"
NODES = 1024
ROUNDS = 10_000
SLIME_HPC = str(Path(sys.executable).with_name("slime-hpc"))

Clock = Callable[[], float]


def cpu_of_children() -> float:
    """Seconds: what a wait would be on a machine that does nothing else."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def call(*command: str) -> str:
    """What it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def timed(clock: Clock, work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


class Submitter:
    """Submits held jobs, each with a run directory of its own, and cancels them."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch
        self._count = 0

    def submit(self, clock: Clock) -> float:
        """`slime-hpc submit`."""
        self._count += 1
        sets = (f"model.hf_checkpoint={self._model}", f"run_dir={self.run.path}", "trainer.sbatch.hold=true")
        command = (SLIME_HPC, "submit", str(PROFILE), *(f"--set={value}" for value in sets))
        seconds = timed(clock, lambda: call(*command))
        call("scancel", read_json(self.run.submit)["job_id"])
        return seconds

    def sbatch(self, clock: Clock) -> float:
        """The script of the last submission, by sbatch."""
        job_ids = []
        script = str(self.run.attempt(1).script)
        seconds = timed(clock, lambda: job_ids.append(call("sbatch", "--parsable", script).strip()))
        call("scancel", *job_ids)
        return seconds

    @property
    def run(self) -> RunDir:
        return RunDir(self._scratch / f"run{self._count}")


def add_rounds(run: RunDir, rounds: int) -> None:
    """Rows as the driver writes them."""
    groups = [[Sample(0, 0, "p", reward=0.5, response_length=8, status=SampleStatus.COMPLETED)]]
    names = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "train/ppo_kl", "train/lr")
    phases = ("rollout", "reward", "train", "update_weights", "step")
    metrics = dict.fromkeys((*names, *(f"perf/{phase}_time" for phase in phases)), 0.1234567890123456)
    metrics |= {"attempt": 1, "time": time.time(), **rollout_metrics(groups)}
    append_jsonl(run.metrics, *({"round": number, "step": number + 1, **metrics} for number in range(rounds)))


def measure_render(model: Path) -> Pairs:
    """The whole text of the script, from a checked profile."""

    def load(nodes: int) -> Profile:
        half = nodes // 2
        sets = [f"model.hf_checkpoint={model}", f"trainer.nodes={half}", f"rollout.nodes={half}"]
        return load_profile(PROFILE, sets=sets)

    def render(loaded: Profile) -> float:
        def work() -> None:
            plan = new_plan(loaded)
            render_script(plan, supervisor_command(plan))

        return timed(time.perf_counter, work)

    large, small = load(NODES), load(2)
    name = f"plan and render {NODES} nodes; 2 nodes"
    return alternate(name, "s", lambda: render(large), lambda: render(small), pairs=101)


def measure_submit(submitter: Submitter, clock: Clock, label: str) -> Pairs:
    name = f"slime-hpc submit; sbatch of the same script{label}"
    return alternate(name, "s", lambda: submitter.submit(clock), lambda: submitter.sbatch(clock))


def measure_status(submitter: Submitter, clock: Clock, label: str) -> Pairs:
    runs = {}
    for rounds in (ROUNDS, 1):
        submitter.submit(clock)
        runs[rounds] = str(submitter.run.path)
        add_rounds(submitter.run, rounds)

    def status(rounds: int) -> float:
        return timed(clock, lambda: call(SLIME_HPC, "status", runs[rounds]))

    name = f"slime-hpc status after {ROUNDS} rounds; after 1{label}"
    return alternate(name, "s", lambda: status(ROUNDS), lambda: status(1))


def cache_bytecode(directory: Path) -> None:
    """As it is once a package has been used, whatever this shell's settings."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(directory)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        cache_bytecode(Path(scratch) / "bytecode")
        model = Path(scratch) / "model"
        make_tiny_qwen3(model)
        submitter = Submitter(model, Path(scratch))
        rows = [measure_render(model)]
        for clock, label in ((time.perf_counter, ""), (cpu_of_children, ", CPU time")):
            rows += [measure_submit(submitter, clock, label), measure_status(submitter, clock, label)]
    print(table(rows))


if __name__ == "__main__":
    main()
