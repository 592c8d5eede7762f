"""Scores samples in worker processes that are killed when a sample takes too long."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pebble import CONSTS, ProcessExpired, ProcessPool

from slime_hpc.errors import RunFailed, UserError
from slime_hpc.rewards.worker import IMPORT_TIMEOUT_S, Args, Outcome, find_problem, grade, prepare
from slime_hpc.spec.run import Reward, RunSpec
from slime_hpc.types import Sample

CLOSE_TIMEOUT_S = 10.0
CONSTS.term_timeout = 0.2
"""Seconds from SIGTERM to SIGKILL: inside a job the workers inherit a mask that blocks SIGTERM."""


class RewardError(RunFailed):
    """The user's reward function failed on a sample: names function, sample and what it said."""

    def __init__(self, path: str, sample: Sample, problem: str) -> None:
        self.path = path
        self.sample_index = sample.index
        super().__init__(f"reward {path} failed on sample {sample.index} (prompt {sample.group_index}): {problem}")


class RewardPool:
    """Calls ``module.function(args, sample)``, sync or async, with a hard time limit for each sample.

    A user's function that fails ends the run. One of our verifiers that hangs, dies or chokes on an answer has not
    verified it: the sample gets 0, and ``metadata["unverified"]`` says why.

    Workers are fresh interpreters (spawn): forking a process that has threads can deadlock.
    ``multiprocessing`` imports the parent's main module in each, unless that is a ``__main__``.
    """

    def __init__(self, reward: Reward, profile_dir: Path, *, workers: int | None = None) -> None:
        self._reward = reward
        self._path = reward.custom_rm_path or f"slime_hpc.rewards.{reward.rm_type}.grade"
        self._timeout_s = reward.timeout_s
        self._pool = ProcessPool(
            max_workers=workers or len(os.sched_getaffinity(0)),
            initializer=prepare,
            initargs=(profile_dir, self._path),
            context=multiprocessing.get_context("spawn"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Import the function in a worker. UserError if that fails, or takes longer than IMPORT_TIMEOUT_S."""
        future = self._pool.schedule(find_problem, args=[self._path], timeout=IMPORT_TIMEOUT_S)
        try:
            problem = future.result()
        except TimeoutError:
            problem = f"importing it took longer than {IMPORT_TIMEOUT_S:.0f} s"
        except ProcessExpired as error:
            problem = f"importing it ended the process (exit code {error.exitcode})"
        if problem is not None:
            if self._reward.rm_type is not None:
                problem += "\ninstall what the verifiers need: slime-hpc[engines]"
            raise UserError(f"reward: cannot use {self._reward.rm_type or self._path!r}: {problem}")

    async def score(self, samples: Sequence[Sample], args: Args) -> list[Sample]:
        """Set ``reward`` of every sample, and ``metadata`` to what the function left there; return the unverified.

        RewardError for the first sample it raises on, hangs on, or returns no finite number for.
        """
        futures = [self._pool.schedule(grade, args=[self._path, args, s], timeout=self._timeout_s) for s in samples]
        try:
            for sample, future in zip(samples, futures, strict=True):
                self._apply(sample, await self._outcome(asyncio.wrap_future(future)))
            return [sample for sample in samples if "unverified" in sample.metadata]
        finally:
            for future in futures:
                future.cancel()  # type: ignore[no-untyped-call]

    async def _outcome(self, future: asyncio.Future[Outcome]) -> Outcome:
        try:
            return await future
        except TimeoutError:
            problem = f"took longer than reward.timeout_s = {self._timeout_s:g} s and was killed"
        except ProcessExpired as error:
            problem = f"its process died (exit code {error.exitcode})"
        return Outcome(problem=problem, killed=True)

    def _apply(self, sample: Sample, outcome: Outcome) -> None:
        if outcome.killed and self._reward.rm_type is not None:
            sample.reward = 0.0
            sample.metadata = {**sample.metadata, "unverified": outcome.problem}
            return
        if outcome.problem is not None:
            raise RewardError(self._path, sample, outcome.problem)
        sample.reward = outcome.value
        sample.metadata = outcome.metadata or {}

    def close(self) -> None:
        """End all workers, busy or not."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join(CLOSE_TIMEOUT_S)


def reward_args(spec: RunSpec) -> Args:
    """The ``args`` of the user's functions: the profile's values under slime's flag names."""
    sections = (spec.data, spec.sampling, spec.reward, spec.algorithm)
    flags = {name: value for section in sections for name, value in section}
    return Args(**flags, hf_checkpoint=str(spec.model.hf_checkpoint), num_rollout=spec.num_rollout, seed=spec.seed)
