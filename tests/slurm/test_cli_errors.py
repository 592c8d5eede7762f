"""Bad input against a real Slurm: one message, the right exit code, nothing queued, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

pytestmark = pytest.mark.usefixtures("devcluster")


def slime_hpc(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from slime_hpc.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environ, timeout=120)


def queued() -> list[str]:
    """Every job that waits or runs. (A refused one stays a while, as FAILED.)"""
    squeue = ["squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%A %T"]
    return subprocess.run(squeue, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    directory = tmp_path / "quickstart"
    directory.mkdir()
    for name in ("profile.yaml", "prompts.jsonl", "reward.py"):
        shutil.copy(QUICKSTART / name, directory)
    (directory / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / "model" / name).touch()
    return directory / "profile.yaml"


@pytest.fixture
def nothing_happens(tmp_path: Path) -> Iterator[Path]:
    """A run directory's name; afterwards no job was queued, and the directory is not there."""
    before = queued()
    yield tmp_path / "runs" / "bad"
    assert queued() == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("override", "exit_code", "message"),
    [
        ("account=nosuch", 1, "Invalid account or account/partition combination specified"),
        ("qos=nosuch", 1, "Invalid qos specification"),
        ("trainer.gres=gpu:99", 1, "Requested node configuration is not available"),
        ("rollout.sbatch={nodelist: nosuch}", 1, "Invalid node name specified"),
        ("rollout.sbatch={nosuchoption: x}", 1, "unrecognized option"),
        ("rollout={partition: rollouts, cpus_per_task: 1, gpus_per_node: 1}", 2, "did you mean 'rollout'?"),
        ("trainer.nodes=99", 2, "trainer.nodes"),
        ("rollout.gpus_per_engine=3", 2, "3 does not divide gpus_per_node (1)"),
        ("sampling.colour=red", 2, "sampling.colour: unknown key"),
        ("num_rollout=many", 2, 'num_rollout: "many" is not a whole number'),
        ("model.hf_checkpoint=.", 2, "has no config.json"),
    ],
)
def test_refused(
    quickstart: Path, nothing_happens: Path, override: str, exit_code: int, message: str, dry_run: list[str]
) -> None:
    done = slime_hpc("submit", quickstart, "--set", f"run_dir={nothing_happens}", "--set", override, *dry_run)
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_slurm_on_the_path(quickstart: Path, nothing_happens: Path) -> None:
    done = slime_hpc("submit", quickstart, "--set", f"run_dir={nothing_happens}", PATH="/nowhere")
    assert done.returncode == 1
    assert "is not on PATH" in done.stderr and "Traceback" not in done.stderr


def test_dry_run_is_accepted(quickstart: Path, nothing_happens: Path) -> None:
    done = slime_hpc("submit", quickstart, "--set", f"run_dir={nothing_happens}", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "dry run, nothing submitted; Slurm accepts it\n")


def test_an_awkward_run_directory_in_use_and_cancel(quickstart: Path, tmp_path: Path) -> None:
    """A real job that waits for ever, since its begin lies in the future."""
    run = tmp_path / "it's my run, v1 (a)"
    begin = ["--set", "trainer.sbatch={begin: now+1hour}", "--set", "rollout.sbatch={begin: now+1hour}"]
    submit = ["submit", quickstart, "--json", "--set", f'run_dir="{run}"', *begin]
    record = json.loads(slime_hpc(*submit).stdout)
    try:
        show = ["scontrol", "show", "job", record["job_id"]]
        shown = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        assert f"StdOut={run}/slurm-{record['job_id']}.out" in shown
        assert "Partition=train" in shown and "Partition=rollout" in shown and f"Comment={record['token']}" in shown

        before = sorted(run.rglob("*"))
        again = slime_hpc(*submit)
        assert again.returncode == 2
        assert f"is in use by job {record['job_id']}" in again.stderr
        assert sorted(run.rglob("*")) == before

        (run / "submit.json").unlink()  # as if the client had died before it wrote the record
        report = json.loads(slime_hpc("status", run, "--json").stdout)
        assert (report["verdict"], report["attempts"][0]["job_id"]) == ("waiting", record["job_id"])
        assert report["pending"].keys() == {"trainer", "rollout"}
    finally:
        cancelled = slime_hpc("cancel", run, "--json")
    assert json.loads(cancelled.stdout)["cancelled"] is True
    assert json.loads(slime_hpc("status", run, "--json").stdout)["verdict"] == "cancelled"
    assert json.loads(slime_hpc("cancel", run, "--json").stdout)["cancelled"] is False
