"""One round's samples: every prompt several times, over all engines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slime_hpc.errors import DeadlineExceeded
from slime_hpc.rollout.client import Completion, EngineClient
from slime_hpc.rollout.data import Draw
from slime_hpc.spec.run import Sampling
from slime_hpc.types import Sample, SampleStatus, WeightVersion

REQUESTS_PER_ENGINE = 256
"""In flight at once to one engine; it queues what it cannot run."""

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


async def generate_groups(
    clients: Sequence[EngineClient],
    draws: Sequence[Draw],
    sampling: Sampling,
    *,
    deadline_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Sample]]:
    """``n_samples_per_prompt`` samples for each draw, in the order of the draws.

    Sample i goes to engine i mod len(clients). ``progress(done, total)`` is called after each.
    DeadlineExceeded if some are missing after ``deadline_s``; EngineError if an engine fails.
    """
    n = sampling.n_samples_per_prompt
    blank = [_blank(draw, draw.group_index * n + i) for draw in draws for i in range(n)]
    gates = [asyncio.Semaphore(REQUESTS_PER_ENGINE) for _ in clients]
    params = sampling_params(sampling)
    done = 0

    async def fill(sample: Sample) -> None:
        nonlocal done
        engine = sample.index % len(clients)
        async with gates[engine]:
            completion = await clients[engine].generate(sample.tokens, params)
        _fill(sample, completion)
        done += 1
        if progress is not None:
            progress(done, len(blank))

    try:
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
            for sample in blank:
                tasks.create_task(fill(sample))
    except TimeoutError:
        waiting = sorted({clients[s.index % len(clients)].url for s in blank if s.status is SampleStatus.PENDING})
        raise DeadlineExceeded(
            f"{len(blank) - done} of {len(blank)} samples were missing after {deadline_s:.0f} s,"
            f" from {', '.join(waiting)}"
        ) from None
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first failure cancelled the others
    return [blank[i : i + n] for i in range(0, len(blank), n)]


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names; the response's text keeps every token, special ones and the stop included."""
    return {
        "temperature": sampling.rollout_temperature,
        "max_new_tokens": sampling.rollout_max_response_len,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


def _blank(draw: Draw, index: int) -> Sample:
    prompt = draw.prompt
    return Sample(draw.group_index, index, prompt.text, tokens=list(prompt.tokens), label=prompt.label)


def _fill(sample: Sample, completion: Completion) -> None:
    sample.tokens = sample.tokens + list(completion.tokens)
    sample.response = completion.text
    sample.response_length = len(completion.tokens)
    sample.loss_mask = [1] * len(completion.tokens)
    sample.rollout_log_probs = list(completion.log_probs)
    sample.weight_version = WeightVersion.parse(completion.weight_version)
    sample.status = _STATUS[completion.finish_reason]
