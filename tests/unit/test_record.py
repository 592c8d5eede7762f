from __future__ import annotations

from slime_hpc.driver.record import rollout_metrics, round_line
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
