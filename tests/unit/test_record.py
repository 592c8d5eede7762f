from __future__ import annotations

from pathlib import Path

import pytest

from slime_hpc.driver.record import RunRecorder, eval_result, rollout_metrics, round_line
from slime_hpc.records import EventLog, read_jsonl
from slime_hpc.report import Evaluation, load_evaluations, wilson_interval
from slime_hpc.run_dir import RunDir
from slime_hpc.types import Sample, SampleStatus


def test_round_line() -> None:
    row = {"round": 6, "rollout/raw_reward": 0.25, "train/grad_norm": 0.5, "perf/rollout_time": 1.24, "perf/x": 1}
    assert round_line(row, 50) == "round  6 of 0-49  reward 0.250  grad norm 0.50  rollout 1.2s"


def test_rollout_metrics() -> None:
    def sample(reward: float, length: int, status: SampleStatus) -> Sample:
        return Sample(0, 0, "p", reward=reward, response_length=length, status=status)

    groups = [
        [sample(1, 4, SampleStatus.COMPLETED), sample(1, 8, SampleStatus.TRUNCATED)],
        [sample(0, 8, SampleStatus.TRUNCATED), sample(0.5, 8, SampleStatus.TRUNCATED)],
    ]
    assert rollout_metrics(groups) == {
        "rollout/raw_reward": 0.625,
        "rollout/response_lengths": 7,
        "rollout/truncated_ratio": 0.75,
        "rollout/zero_std_ratio": 0.5,
    }


def answers(*rewards: float, samples: int = 1) -> list[list[Sample]]:
    """``samples`` to a prompt."""
    flat = [Sample(0, i, "p", reward=reward, status=SampleStatus.COMPLETED) for i, reward in enumerate(rewards)]
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]


def test_only_exact_rewards_pass_or_fail() -> None:
    assert eval_result(answers(1, 0, 1, 1))["passed"] == 3
    assert eval_result(answers(1, 0.3, 1, 1))["passed"] is None


def test_evaluations_are_recorded_and_reported(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    recorder = RunRecorder(run, 1, 50, EventLog(run.events, attempt=1, who="driver"))
    recorder.evaluated(0, {"exact": answers(1, 0, 0, 0), "part": answers(0.5, 0.7)})
    metrics = recorder.evaluated(50, {"exact": answers(1, 1, 1, 0), "twice": answers(1, 0, 1, 1, samples=2)})
    assert metrics["eval/exact"] == metrics["eval/twice"] == 0.75
    assert [row["reward"] for row in read_jsonl(run.evaluation("exact", 50, 1))] == [1, 1, 1, 0]
    assert load_evaluations(run) == [
        Evaluation("exact", 0, 0.25, 4, wilson_interval(1, 4)),
        Evaluation("exact", 50, 0.75, 4, wilson_interval(3, 4)),
        Evaluation("part", 0, 0.6, 2, None),
        Evaluation("twice", 50, 0.75, 4, None),
    ]


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (474, 512, 0.8998, 0.9455)]
)
def test_wilson_interval(passed: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(passed, total) == pytest.approx((low, high), abs=1e-4)
