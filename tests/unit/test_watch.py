"""Looking on: what is new in a run's records, as lines and as exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from slime_hpc import watch as watching
from slime_hpc.records import EventLog, append_jsonl, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.load import Profile
from slime_hpc.submit import submit_run
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId
from slime_hpc.watch import LiveScreen, News, PlainScreen, Tail, View, Watcher, event_text, remaining_s, watch

JOB = JobId(1)


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def run(profile: Profile, slurm: FakeSlurm) -> RunDir:
    submit_run(profile, slurm, supervise)
    return RunDir(profile.spec.run_dir)


def add_round(run: RunDir, number: int, seconds: float = 2.0) -> None:
    row = {"attempt": 1, "round": number, "step": number + 1, "time": 1000.0 + number, "perf/step_time": seconds}
    append_jsonl(run.metrics, {**row, "rollout/raw_reward": 0.25, "rollout/weight_lag": 0})


def end(run: RunDir, cause: str, at: float = 2000.0) -> None:
    ended = {"attempt": 1, "cause": cause, "detail": f"because of {cause}", "role": None, "node": None, "round": 1}
    write_json(run.attempt(1).ended, {**ended, "started": 1000.0, "ended": at, "exit_code": 0})


def test_tail_gives_each_whole_row_once(run: RunDir) -> None:
    tail = Tail(run.metrics)
    assert tail.rows() == []
    run.metrics.write_text('{"round": 1}\n{"round"')
    assert tail.rows() == [{"round": 1}]
    with open(run.metrics, "a") as file:
        file.write(': 2}\n{"torn\nnull\n[]\n{"a": 1}\n{"round": 3}\n')
    assert tail.rows() == [{"round": 2}, {"round": 3}]
    assert tail.rows() == []


def test_lines_come_in_order_of_time_and_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher(run, PlainScreen())
    EventLog(run.events, attempt=1, who="driver")("trainer_ready", ranks=2, nodes=["n1"])
    EventLog(run.attempt(1).events("agent-n1"), attempt=1, who="agent-n1")("swept", left=[])
    add_round(run, 0)
    assert watcher.look("")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("round  0 of 0-49  reward 0.250  lag 0  left 00:01:38") and "trainer is ready: 2" in second
    assert not watcher.look("") and capsys.readouterr().out == ""


def test_the_past_is_shown_in_part(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(40):
        add_round(run, number)
    Watcher(run, PlainScreen()).look("")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == watching.BACKLOG and "round 39 of" in lines[-1]


def test_remaining_is_of_the_median_round() -> None:
    rounds = [{"round": number, "perf/step_time": seconds} for number, seconds in enumerate((60.0, 2.0, 3.0, 4.0))]
    assert remaining_s(rounds, 10) == 6 * 3.5
    assert remaining_s([], 10) is None
    assert remaining_s([{"round": 3}], 10) is None


def test_events_are_told_and_unknown_ones_passed_over() -> None:
    nodes = {"trainer": ["n1", "n2"], "rollout": ["n3"]}
    assert event_text({"event": "started", "attempt": 2, "nodes": nodes}) == (
        "attempt 2 starts on trainer n1, n2; rollout n3"
    )
    assert event_text({"event": "engine_started", "engine": "engine 0"}) == "engine 0 is loading on ?"
    assert event_text({"event": "evaluated", "set": "a", "rounds": 1, "samples": 4}) == (
        "a after 1 rounds: reward ? of 4 samples"
    )
    assert event_text({"event": "of tomorrow"}) is None


def test_the_queue_is_waited_for_with_its_reason(
    run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.jobs[1].components[1].reason = "Resources"
    steps: list[Callable[[], Any]] = [
        lambda: None,
        lambda: (slurm.set_state(JOB, "RUNNING"), add_round(run, 0)),
        lambda: add_round(run, 49),
        lambda: (slurm.set_state(JOB, "COMPLETED"), end(run, "finished")),
    ]
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: steps.pop(0)())
    report = watch(run, slurm, PlainScreen())
    out = capsys.readouterr().out
    assert (report.verdict, steps) == ("finished", [])
    assert out.count("job 1 is in the queue: Slurm's reason is trainer None, rollout Resources") == 1
    assert out.index("in the queue") < out.index("round  0 of") < out.index("round 49 of")


def test_slurm_is_asked_rarely(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slept = [], []
    queue = slurm.queue
    monkeypatch.setattr(slurm, "queue", lambda jobs: asked.append(jobs) or queue(jobs))
    clock = iter(range(10_000))
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock) * watching.POLL_S)
    monkeypatch.setattr(
        watching.time,
        "sleep",
        lambda s: slept.append(s) or (slurm.set_state(JOB, "FAILED") if len(slept) == 100 else None),
    )
    assert watch(run, slurm, PlainScreen()).verdict == "failed"
    assert len(asked) <= 2 + 100 * watching.POLL_S / watching.ASK_WHILE_PENDING_S * 2


def test_a_requeued_job_is_waited_for(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor has written its end while Slurm still makes up its mind."""
    slurm.set_state(JOB, "RUNNING")
    write_json(run.attempt(1).owner, {"job_id": "1", "restart_count": 0, "host": "n1", "started": 0.0})
    end(run, "preempted", at=time.time() + 1000)
    states = iter(["COMPLETING", "PENDING", "RUNNING", "CANCELLED"])
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        state = next(states, None)
        if state is not None:
            slurm.set_state(JOB, state)

    monkeypatch.setattr(watching, "ASK_WHILE_PENDING_S", -1.0)
    monkeypatch.setattr(watching.time, "sleep", nap)
    assert watch(run, slurm, PlainScreen()).attempts[-1].state == "CANCELLED"
    assert naps.count(watching.ASK_WHILE_ENDING_S) >= 2


def test_an_end_that_is_written_while_slurm_is_asked_counts(run: RunDir, slurm: FakeSlurm) -> None:
    class Slow(FakeSlurm):
        def queue(self, job_ids: Any) -> Any:
            end(run, "finished")
            slurm.set_state(JOB, "COMPLETED")
            return slurm.queue(job_ids)

    assert watch(run, Slow(), PlainScreen()).verdict == "finished"


def test_live_view_fits_80_columns() -> None:
    console = Console(width=80, height=30, force_terminal=True, record=True, highlight=False)
    row = {"round": 12345, "rollout/raw_reward": 0.5, "rollout/weight_lag": 1.5, "train/grad_norm": 10.25}
    row |= {f"perf/{name}_time": 123.45 for name in ("rollout", "reward", "train", "update_weights", "save")}
    row |= {"train/train_rollout_logprob_abs_diff": 3e-7}
    news = [News("[00:00:00] engine 0 is healthy", is_round=False), News("round 12345 …", is_round=True)]
    with LiveScreen(console) as screen:
        screen.show(View("quickstart  round 3 of 0-49: train", "", news, [row]))
    text = console.export_text()
    assert "engine 0 is healthy" in text and "quickstart  round 3 of 0-49: train" in text
    assert all(word in text for word in ("12345", "0.500", "1.5", "10.25", "3.0e-07", "123s"))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "round  reward" in text, "headings in one line"


@pytest.mark.parametrize(("cause", "code"), [("finished", 0), ("crashed", 3), ("cancelled", 3)])
def test_exit_code_says_how_it_ended(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: str,
    code: int,
) -> None:
    from slime_hpc.cli import main
    from slime_hpc.slurm import commands

    monkeypatch.setattr(commands, "SlurmCli", lambda: slurm)
    slurm.set_state(JOB, "COMPLETED")
    end(run, cause)
    with pytest.raises(SystemExit) as exit_:
        main(["status", "--watch", str(run.path)])
    assert (exit_.value.code or 0) == code
    assert f"because of {cause}" in capsys.readouterr().out


def test_ctrl_c_says_how_to_look_again(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slime_hpc.cli import main
    from slime_hpc.slurm import commands

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "SlurmCli", lambda: slurm)
    monkeypatch.setattr(watching.time, "sleep", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(["status", "--watch", str(run.path)])
    assert exit_.value.code == 130
    assert f"the run goes on; to look again: slime-hpc status --watch {run.path}" in capsys.readouterr().err
    assert slurm.jobs[1].components[0].state.is_pending


def test_watch_and_json_do_not_go_together(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    from slime_hpc.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(["status", "--watch", "--json", str(run.path)])
    assert exit_.value.code == 2 and "leave out --json" in capsys.readouterr().err
    assert json.loads(run.submit.read_text())["job_id"] == "1"
