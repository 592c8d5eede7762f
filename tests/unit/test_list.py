"""`slime-hpc list`: which directories it looks into, what it asks Slurm, what it shows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.listing import LEVELS, load_listing
from slime_hpc.plan import one_host_plan
from slime_hpc.records import append_jsonl, read_json, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm import commands
from slime_hpc.slurm.parse import AccountingRow, QueueRow
from slime_hpc.spec.load import load_profile
from slime_hpc.submit import begin_local_run, submit_run
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId

Cli = Callable[..., tuple[int, str, str]]
Make = Callable[..., RunDir]


class CountingSlurm(FakeSlurm):
    """Remembers what it was asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[tuple[str, list[int]]] = []

    def queue(self, job_ids: Sequence[JobId]) -> list[QueueRow]:
        self.asked.append(("queue", [job.number for job in job_ids]))
        return super().queue(job_ids)

    def accounting(self, job_ids: Sequence[JobId]) -> list[AccountingRow] | None:
        self.asked.append(("accounting", [job.number for job in job_ids]))
        return super().accounting(job_ids)

    def find(self, *tokens: str) -> list[QueueRow]:
        self.asked.append(("find", []))
        return [row for row in super().queue([JobId(n) for n in self.jobs]) if row.comment in tokens]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> CountingSlurm:
    fake = CountingSlurm()
    monkeypatch.setattr(commands, "SlurmCli", lambda: fake)
    return fake


@pytest.fixture
def make(quickstart: Path, slurm: CountingSlurm, tmp_path: Path) -> Make:
    """``make("a/b", heard=1000.0)``: a submitted run below tmp_path/runs."""

    def submit(where: str, heard: float) -> RunDir:
        run = RunDir(tmp_path / "runs" / where)
        profile = load_profile(quickstart, sets=[f"run_dir={run.path}", f"name={run.path.name}"])
        submit_run(profile, slurm, lambda run_dir, attempt: None)
        write_json(run.submit, {**read_json(run.submit), "submitted": heard})
        slurm.asked.clear()
        return run

    return submit


def end(run: RunDir, cause: str, when: float) -> None:
    ended = {"attempt": 1, "cause": cause, "detail": cause, "role": None, "node": None, "round": None}
    write_json(run.attempt(1).ended, ended | {"started": 1.0, "ended": when, "exit_code": 0})


def listed(cli: Cli, *directories: Path) -> Any:
    code, out, err = cli("list", *directories, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_fields_and_order(cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path) -> None:
    waiting, running, finished = make("waiting", 3000.0), make("sub/running", 2000.0), make("sub/finished", 1000.0)
    slurm.set_state(JobId(3), "RUNNING")
    append_jsonl(running.metrics, {"attempt": 1, "round": 6, "step": 7, "time": 2500.0, "rollout/raw_reward": 0.25})
    end(finished, "finished", 9000.0)
    slurm.jobs[5].forgotten = True
    found = listed(cli, tmp_path / "runs")
    assert [run["name"] for run in found["runs"]] == ["finished", "waiting", "running"]
    assert found["runs"][2] == {
        "name": "running", "state": "running", "verdict": "ok", "round": 6, "num_rollout": 50, "reward": 0.25,
        "job_id": "3", "last_heard": 2500.0, "run_dir": str(running.path),
    }  # fmt: skip
    assert [(run["state"], run["verdict"]) for run in found["runs"][:2]] == [
        ("ended", "finished"),
        ("pending", "waiting"),
    ]
    assert found["runs"][1]["run_dir"] == str(waiting.path)
    assert (found["unreadable"], found["slurm_problem"]) == ({}, None)


def test_slurm_is_asked_once(cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path) -> None:
    for i in range(5):
        make(f"run{i}", 1000.0 + i)
    listed(cli, tmp_path / "runs")
    assert slurm.asked == [("queue", [1, 3, 5, 7, 9])]


def test_accounts_are_asked_only_about_what_nobody_else_knows(
    cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path
) -> None:
    make("queued", 1.0), make("lost", 2.0), end(make("ended", 3.0), "crashed", 3.0)
    for number, state in ((3, "TIMEOUT"), (5, "FAILED")):
        slurm.set_state(JobId(number), state)
        slurm.jobs[number].forgotten = True
    found = {run["name"]: run["verdict"] for run in listed(cli, tmp_path / "runs")["runs"]}
    assert found == {"queued": "waiting", "lost": "failed", "ended": "failed"}
    assert slurm.asked == [("queue", [1, 3, 5]), ("accounting", [3])]


def test_jobs_that_were_not_recorded_are_found_together(
    cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path
) -> None:
    for i in range(3):
        make(f"run{i}", 1.0).submit.unlink()
    found = listed(cli, tmp_path / "runs")["runs"]
    assert sorted(run["job_id"] for run in found) == ["1", "3", "5"]
    assert slurm.asked == [("find", []), ("queue", [1, 3, 5])]


def test_without_slurm_it_says_so_once(
    cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("one", 1.0), make("two", 2.0), end(make("three", 3.0), "finished", 3.0)

    def deaf(job_ids: object) -> list[QueueRow]:
        raise ClusterError("squeue is not on PATH")

    monkeypatch.setattr(slurm, "queue", deaf)
    found = listed(cli, tmp_path / "runs")
    assert [run["verdict"] for run in found["runs"]] == ["finished", "unknown", "unknown"]
    assert [run["job_id"] for run in found["runs"][1:]] == ["3", "1"]
    assert found["slurm_problem"] == "squeue is not on PATH"
    code, out, _ = cli("list", tmp_path / "runs")
    assert code == 0 and out.count("squeue is not on PATH") == 1


def test_accounts_that_do_not_answer_hide_only_what_they_know(
    cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("queued", 1.0), make("lost", 2.0)
    slurm.jobs[3].forgotten = True

    def deaf(job_ids: object) -> list[AccountingRow]:
        raise ClusterError("sacct did not answer")

    monkeypatch.setattr(slurm, "accounting", deaf)
    found = listed(cli, tmp_path / "runs")
    assert {run["name"]: run["verdict"] for run in found["runs"]} == {"queued": "waiting", "lost": "unknown"}
    assert found["slurm_problem"] == "sacct did not answer"


def test_a_number_that_another_submission_has_now(cli: Cli, make: Make, slurm: CountingSlurm, tmp_path: Path) -> None:
    old = make("old", 1.0)
    write_json(old.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 1.0})
    end(old, "finished", 2.0)
    slurm.jobs.clear()
    make("new", 3.0)  # job 1 again, of a cluster that was started afresh
    found = {run["name"]: run["verdict"] for run in listed(cli, tmp_path / "runs")["runs"]}
    assert found == {"new": "waiting", "old": "finished"}


def test_runs_without_slurm_ask_nobody(cli: Cli, quickstart: Path, slurm: CountingSlurm, tmp_path: Path) -> None:
    profile = load_profile(quickstart, sets=[f"run_dir={tmp_path}/runs/here"])
    begin_local_run(profile, one_host_plan(profile, 2))
    (run,) = listed(cli, tmp_path / "runs")["runs"]
    assert (run["state"], run["verdict"], run["job_id"]) == ("running", "ok", None)
    assert slurm.asked == []


def test_where_it_looks(cli: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    run, hidden = make("run", 1.0), make(".hidden/run", 1.0)
    deepest = make("/".join("abcdefgh"[:LEVELS]), 1.0)
    make("/".join("tuvwxyz"[: LEVELS + 1]), 1.0)
    shutil.copytree(run.path, run.path / "copy")  # below a run
    (runs / "link").symlink_to(run.path)
    (runs / "empty" / "attempts" / "0001").mkdir(parents=True)
    expected = {str(run.path), str(deepest.path)}
    assert {found["run_dir"] for found in listed(cli, runs)["runs"]} == expected
    assert {found["run_dir"] for found in listed(cli, runs, run.path, runs)["runs"]} == expected
    assert [found["run_dir"] for found in listed(cli, hidden.path)["runs"]] == [str(hidden.path)]
    monkeypatch.chdir(runs)
    assert {found["run_dir"] for found in listed(cli)["runs"]} == expected
    code, out, err = cli("list", runs / "nosuch")
    assert (code, out) == (2, "") and f"{runs}/nosuch is not a directory" in err
    assert cli("list", runs / "empty") == (0, "no run found\n", "")


def test_what_cannot_be_read_is_named(cli: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("good", 1.0)
    torn, other = make("torn", 1.0), make("other", 1.0)
    torn.submit.write_text("{")
    other.attempt(1).plan.write_text("{}")
    closed = tmp_path / "runs" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # root may read everything
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = listed(cli, tmp_path / "runs")
    assert [run["name"] for run in found["runs"]] == ["good"]
    assert found["unreadable"].keys() == {str(closed), str(torn.path), str(other.path)}
    assert found["unreadable"][str(closed)] == "Permission denied"
    assert "another version" in found["unreadable"][str(other.path)]
    out = cli("list", tmp_path / "runs")[1]
    assert f"not looked at: {closed}: Permission denied\n" in out


def test_a_line_a_run(cli: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = make(f"{'long' * 20}/demo", 1.0)
    append_jsonl(run.metrics, {"attempt": 1, "round": 49, "step": 50, "rollout/raw_reward": 0.9375})
    heading, line = cli("list", tmp_path / "runs")[1].splitlines()
    assert heading.split() == ["name", "state", "verdict", "rounds", "reward", "job", "last", "heard", "path"]
    assert line.startswith("demo  pending  waiting  50/50   0.938   1    ")
    assert line.endswith(f"  {run.path}")
    assert line.index(str(run.path)) == heading.index("path")


def test_newest_of_all_signs_of_life(make: Make, slurm: CountingSlurm, tmp_path: Path) -> None:
    run = make("run", 1.0)

    def heard() -> float | None:
        (found,) = load_listing([tmp_path / "runs"], slurm).runs
        return found.last_heard

    write_json(run.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 2.0})
    assert heard() == 2.0
    write_json(run.heartbeat, {"time": 5.0, "phase": "train", "round": 0, "attempt": 1})
    assert heard() == 5.0
    end(run, "crashed", 4.0)
    assert heard() == 5.0
    append_jsonl(run.metrics, {"attempt": 1, "round": 0, "step": 1, "time": 6.0})
    assert heard() == 6.0
    for path in (run.submit, run.attempt(1).owner, run.heartbeat, run.attempt(1).ended, run.metrics):
        path.unlink()
    assert heard() is None
