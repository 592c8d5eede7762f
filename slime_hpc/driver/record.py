"""What the driver writes down: metrics, rollouts, heartbeat. It is the one writer of these files."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_hpc.checkpoint import require_newest_attempt
from slime_hpc.driver.deadline import say
from slime_hpc.records import EventLog, append_jsonl, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.types import Groups, Sample, SampleStatus

HEARTBEAT_S = 5.0

_ROUND_COLUMNS = (
    ("rollout/raw_reward", "reward {:.3f}"),
    ("rollout/weight_lag", "lag {:g}"),
    ("train/grad_norm", "grad norm {:.2f}"),
    ("train/train_rollout_logprob_abs_diff", "logp diff {:.1e}"),
    ("perf/rollout_time", "rollout {:.1f}s"),
    ("perf/train_time", "train {:.1f}s"),
    ("perf/update_weights_time", "sync {:.1f}s"),
)


class RunRecorder:
    """Implements ``loop.Recorder`` on a run directory."""

    def __init__(self, run: RunDir, attempt: int, num_rollout: int, log: EventLog) -> None:
        self._run = run
        self._attempt = attempt
        self._num_rollout = num_rollout
        self._log = log
        self._phase = "bring_up"
        self._round = 0
        run.rollouts.mkdir(exist_ok=True)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def phase(self, name: str, round_: int) -> None:
        self._phase, self._round = name, round_

    def round_done(self, round_: int, groups: Groups, metrics: dict[str, Any]) -> None:
        """Append the round to metrics.jsonl after its samples are on disk. ClusterError in an overtaken attempt."""
        require_newest_attempt(self._run, self._attempt)
        _write_samples(self._run.rollout(round_, self._attempt), groups)
        row = {
            "attempt": self._attempt,
            "round": round_,
            "step": round_ + 1,
            "time": time.time(),
            **rollout_metrics(groups),
            **metrics,
        }
        append_jsonl(self._run.metrics, row)
        say(round_line(row, self._num_rollout))

    def evaluated(self, rounds: int, sets: dict[str, Groups]) -> dict[str, float]:
        """What the policy of ``rounds`` trained rounds answered: samples to disk, an event a set, metrics back."""
        metrics: dict[str, float] = {}
        for name, groups in sets.items():
            _write_samples(self._run.evaluation(name, rounds, self._attempt), groups)
            result = eval_result(groups)
            self._log("evaluated", set=name, rounds=rounds, **result)
            say(f"{name} after {rounds} rounds: reward {result['reward']:.3f} of {result['samples']} samples")
            metrics |= {f"eval/{name}": result["reward"], f"eval/{name}-truncated_ratio": result["truncated_ratio"]}
        return metrics

    def finished(self, groups: Groups) -> None:
        """The answers of the exported policy, which was not trained on them."""
        _write_samples(self._run.final_rollout(self._attempt), groups)
        self._log("finished", model=str(self._run.model), **rollout_metrics(groups))

    def _beat(self) -> None:
        while True:
            beat = {"time": time.time(), "attempt": self._attempt, "phase": self._phase, "round": self._round}
            with contextlib.suppress(OSError):  # a full disk or a stale handle may pass; the next beat tells
                write_json(self._run.heartbeat, beat)
            time.sleep(HEARTBEAT_S)


def round_line(row: Mapping[str, Any], num_rollout: int) -> str:
    """One row of ``metrics.jsonl`` as one line; a metric that the row lacks is left out."""
    width = len(str(num_rollout - 1))
    metrics = [form.format(row[name]) for name, form in _ROUND_COLUMNS if row.get(name) is not None]
    return "  ".join([f"round {row['round']:{width}} of 0-{num_rollout - 1}", *metrics])


def rollout_metrics(groups: Groups) -> dict[str, float]:
    """Of one round's samples, under slime's names."""
    samples = [sample for group in groups for sample in group]
    return {
        "rollout/raw_reward": _mean(float(s.reward) for s in samples if s.reward is not None),
        "rollout/response_lengths": _mean(s.response_length for s in samples),
        "rollout/truncated_ratio": _mean(s.status is SampleStatus.TRUNCATED for s in samples),
        "rollout/zero_std_ratio": _mean(len({s.reward for s in group}) == 1 for group in groups),
    }


def eval_result(groups: Groups) -> dict[str, Any]:
    """Of one evaluation set. ``passed`` counts rewards of 1, and is None where a reward lies between 0 and 1."""
    samples = [sample for group in groups for sample in group]
    rewards = [float(s.reward) for s in samples if s.reward is not None]
    return {
        "prompts": len(groups),
        "samples": len(samples),
        "reward": _mean(rewards),
        "passed": sum(r == 1 for r in rewards) if set(rewards) <= {0.0, 1.0} else None,
        "truncated_ratio": _mean(s.status is SampleStatus.TRUNCATED for s in samples),
    }


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _write_samples(path: Path, groups: Groups) -> None:
    append_jsonl(path, *(_row(sample) for group in groups for sample in group))


def _row(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "weight_version": str(sample.weight_version)}
