"""``slime-hpc run`` for real, in a network of its own, where only loopback is; then the export of what it saved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import EXAMPLES, slime_hpc, wait_for

from slime_hpc.records import read_json, read_jsonl
from slime_hpc.run_dir import RunDir

pytestmark = pytest.mark.timeout(600)

START_TO_END_S = 400
SIGNAL_TO_END_S = 60
ROUNDS = 3
ALONE = ("env", "--default-signal=INT", "unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""A network of its own; and what runs the tests in the background had Ctrl-C ignored, which all below would inherit."""


@dataclass(frozen=True)
class LocalRun:
    """A run in the foreground of another process."""

    process: subprocess.Popen[str]
    dir: RunDir
    network: int
    """The inode of its network namespace, which all its processes share."""

    def wait_until(self, name: str, timeout_s: float = 240) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return any(row["event"] == name for path in self.dir.all_events() for row in read_jsonl(path))

        wait_for(look, timeout_s, name)

    def end(self, timeout_s: float) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        assert "Traceback" not in err
        return self.process.returncode, out

    def leftovers(self) -> list[int | Path]:
        rows = [row for path in self.dir.all_events() for row in read_jsonl(path) if row["event"] == "raylet_up"]
        assert rows, "no raylet was up: nothing could be left"
        scratch = [path for row in rows if (path := Path(row["temp_dir"])).exists()]
        return [*_pids_in(self.network), *scratch]

    def listening_beyond_loopback(self) -> list[str]:
        """What ``ss`` says of them."""
        listing = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", "ss", "-Hltnp"]
        lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        loopback = ("127.0.0.1", "[::ffff:127.0.0.1]")
        return [line for line in lines if line.split()[3].rpartition(":")[0] not in loopback]


def _pids_in(network: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{entry}/ns/net").st_ino == network:
                found.append(int(entry))
        except OSError:
            continue  # it has ended meanwhile
    return found


def start(directory: Path, model: Path, num_rollout: int) -> LocalRun:
    profile_dir = directory / "quickstart"
    profile_dir.mkdir()
    for name in ("profile.yaml", "prompts.jsonl", "reward.py"):
        shutil.copy(EXAMPLES / "quickstart" / name, profile_dir)
    run = RunDir(directory / "run")
    sets = {"run_dir": run.path, "model.hf_checkpoint": model, "num_rollout": num_rollout, "checkpoint.interval": 2}
    command = [sys.executable, "-c", "from slime_hpc.cli import main; main()", "run", str(profile_dir / "profile.yaml")]
    command += [f"--set={key}={value}" for key, value in sets.items()]
    process = subprocess.Popen([*ALONE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: process.poll() is not None or run.submit.exists(), 60, "the run's record")
    assert process.poll() is None, process.communicate()
    return LocalRun(process, run, os.stat(f"/proc/{process.pid}/ns/net").st_ino)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="slime hpc run "))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endless(directory: Path, model: Path) -> Iterator[LocalRun]:
    """A run of which driver and Ray are up; killed if the test leaves it alive."""
    run = start(directory, model, 100_000)
    try:
        run.wait_until("driver_started")
        run.wait_until("raylet_up")
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        wait_for(lambda: not run.leftovers(), SIGNAL_TO_END_S, "the end of what a killed run leaves")


def test_it_trains_on_loopback_and_each_checkpoint_is_exported_as_it_was(directory: Path, model: Path) -> None:
    run = start(directory, model, ROUNDS)
    run.wait_until("engine_healthy")
    assert all("sglang::schedul" in line for line in run.listening_beyond_loopback())
    status = json.loads(slime_hpc("status", run.dir.path, "--json"))
    assert (status["state"], status["verdict"]) == ("running", "ok")
    code, out = run.end(START_TO_END_S)
    assert code == 0, out
    assert [line.split()[1:4] for line in out.splitlines() if "] round" in line] == [
        ["round", str(number), "of"] for number in range(ROUNDS)
    ]
    assert out.splitlines()[-1] == f"finished: {ROUNDS} rounds; model in {run.dir.model}"
    assert read_json(run.dir.attempt(1).ended)["cause"] == "finished"
    assert run.leftovers() == []
    status = json.loads(slime_hpc("status", run.dir.path, "--json"))
    assert (status["state"], status["verdict"], status["round"]) == ("ended", "finished", ROUNDS - 1)
    rows = list(read_jsonl(run.dir.metrics))
    assert [row["rollout/weight_lag"] for row in rows] == [0] * ROUNDS
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) < 1e-5

    exported = json.loads(slime_hpc("export", run.dir.path, "-o", directory / "last", "--json"))
    assert (exported["round"], exported["model"]) == (ROUNDS - 1, str(directory / "last"))
    weights = "model.safetensors"
    assert (directory / "last" / weights).read_bytes() == (run.dir.model / weights).read_bytes()
    slime_hpc("export", run.dir.path, "--round", 1)
    assert (run.dir.model_of_round(1) / weights).read_bytes() != (run.dir.model / weights).read_bytes()
    with pytest.raises(AssertionError, match=r"no complete checkpoint of round 0 in .*; of rounds: 1, 2"):
        slime_hpc("export", run.dir.path, "--round", 0)
    with pytest.raises(AssertionError, match="is there already, and no export"):
        slime_hpc("export", run.dir.path, "-o", directory / "quickstart")


def test_ctrl_c_ends_it_cleanly(endless: LocalRun) -> None:
    endless.process.send_signal(signal.SIGINT)
    code, out = endless.end(SIGNAL_TO_END_S)
    assert (code, out.splitlines()[-1]) == (3, "cancelled: ended by Ctrl-C")
    assert read_json(endless.dir.attempt(1).ended)["cause"] == "cancelled"
    assert endless.leftovers() == []


def test_nothing_outlives_a_killed_one(endless: LocalRun) -> None:
    endless.process.kill()
    endless.process.wait()
    wait_for(lambda: not endless.leftovers(), SIGNAL_TO_END_S, "the end of what a killed run leaves")
    status = json.loads(slime_hpc("status", endless.dir.path, "--json"))
    assert (status["state"], status["verdict"]) == ("ended", "unknown")
    assert f"process {endless.process.pid} on {os.uname().nodename} is gone" in status["why"]
