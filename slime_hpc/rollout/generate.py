"""One round's samples: every prompt several times, over all engines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.rollout.client import Completion
from slime_hpc.rollout.data import Draw
from slime_hpc.rollout.router import Router
from slime_hpc.spec.run import Sampling
from slime_hpc.types import Sample, SampleStatus, WeightVersion

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


async def generate_groups(
    router: Router,
    draws: Sequence[Draw],
    sampling: Sampling,
    *,
    deadline_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Sample]]:
    """``n_samples_per_prompt`` samples for each draw, in the order of the draws.

    ``progress(done, total)`` is called after each sample. DeadlineExceeded if some are missing after
    ``deadline_s``; ClusterError if no engine is left.
    """
    n = sampling.n_samples_per_prompt
    blank = [_blank(draw, draw.group_index * n + i) for draw in draws for i in range(n)]
    params = sampling_params(sampling)
    done = 0

    async def fill(sample: Sample) -> None:
        nonlocal done
        _fill(sample, await router.generate(sample.tokens, params))
        done += 1
        if progress is not None:
            progress(done, len(blank))

    tasks = [asyncio.create_task(fill(sample)) for sample in blank]
    try:
        await _all_in_time(tasks, deadline_s, router)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [blank[i : i + n] for i in range(0, len(blank), n)]


async def _all_in_time(tasks: Sequence[asyncio.Task[None]], deadline_s: float, router: Router) -> None:
    """Raises the first failure, or DeadlineExceeded, and leaves the other tasks as they are."""
    if not tasks:
        return
    done, late = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    if late:
        try:
            engines = ", ".join(await router.busy()) or "engines that the router does not tell"
        except ClusterError as error:
            engines = f"engines that cannot be told: {error}"
        raise DeadlineExceeded(
            f"{len(late)} of {len(tasks)} samples were missing after {deadline_s:.0f} s, from {engines}"
        )


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names; the response's text keeps special tokens, but not the one that ended it, which ``tokens`` has."""
    return {
        "temperature": sampling.rollout_temperature,
        "max_new_tokens": sampling.rollout_max_response_len,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": False,
    }


def _blank(draw: Draw, index: int) -> Sample:
    prompt = draw.prompt
    metadata = dict(prompt.metadata)
    return Sample(draw.group_index, index, prompt.text, list(prompt.tokens), label=prompt.label, metadata=metadata)


def _fill(sample: Sample, completion: Completion) -> None:
    sample.tokens = sample.tokens + list(completion.tokens)
    sample.response = completion.text
    sample.response_length = len(completion.tokens)
    sample.loss_mask = [1] * len(completion.tokens)
    sample.rollout_log_probs = list(completion.log_probs)
    sample.weight_version = WeightVersion.parse(completion.weight_version)
    sample.status = _STATUS[completion.finish_reason]
