"""Tokens per second through our client, the router and samples, against SGLang's own bench on the same server.

    python -m benchmarks.generation MODEL_DIR

Both send the same prompts, as tokens, at the same concurrency, and ask for the log-probs of the answer; the server's
cached prefixes are dropped before each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.engine import RunningEngine, model_plan, running_engine
from benchmarks.pairs import alternate, table
from slime_hpc.plan import JobPlan
from slime_hpc.records import read_jsonl
from slime_hpc.rollout.data import Draw, Prompt
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.rollout.router import Router
from slime_hpc.rollout.router_server import RouterServer

DEADLINE_S = 600.0
SEED = 1


@dataclass(frozen=True)
class Load:
    """What both generate: ``requests`` completions of full length, all asked for at once."""

    requests: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * self.response_tokens


async def ours(engine: RunningEngine, server: RouterServer, load: Load, prompts: Sequence[Draw]) -> float:
    """Tokens/s of one round's generation, samples included."""
    sampling = engine.plan.spec.sampling.model_copy(
        update={"n_samples_per_prompt": 1, "rollout_max_response_len": load.response_tokens, "ignore_eos": True}
    )
    async with engine.client() as client, server.client() as api:
        await client.flush_cache()
        await server.wait_ready(api)
        router = Router(api, on_silent=_raise)
        await router.admit([client])
        began = time.perf_counter()
        groups = await generate_groups(router, prompts, sampling, deadline_s=DEADLINE_S)
        seconds = time.perf_counter() - began
        await api.remove_engine(client.url)
    made = sum(sample.response_length for group in groups for sample in group)
    assert made == load.tokens, f"{made} tokens instead of {load.tokens}"
    return made / seconds


def theirs(engine: RunningEngine, load: Load, results: Path) -> float:
    """Tokens/s as SGLang's bench measures them."""
    from sglang.benchmark.serving import cli_main

    asyncio.run(_flush(engine))
    results.unlink(missing_ok=True)
    with mock.patch.object(sys, "argv", ["serving", *_arguments(engine, load, results)]):
        cli_main()
    (result,) = read_jsonl(results)
    made = result["total_output_tokens"]
    assert made == load.tokens, f"{made} tokens instead of {load.tokens}"
    return float(result["output_throughput"])


def _arguments(engine: RunningEngine, load: Load, results: Path) -> list[str]:
    model = str(engine.plan.spec.model.hf_checkpoint)
    options = {
        "backend": "sglang",
        "base-url": engine.server.url,
        "model": model,
        "tokenizer": model,
        "dataset-name": "random-ids",
        "num-prompts": load.requests,
        "random-input-len": load.prompt_tokens,
        "random-output-len": load.response_tokens,
        "random-range-ratio": 1,
        "max-concurrency": load.requests,
        "temperature": 1,
        "seed": SEED,
        "warmup-requests": 0,
        "output-file": results,
    }
    flags = ("tokenize-prompt", "return-logprob", "disable-stream", "disable-tqdm")
    return [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]


def same_prompts(load: Load, model: Path) -> list[Draw]:
    """Those that SGLang's bench makes of these numbers and this seed."""
    import numpy as np
    from sglang.benchmark.datasets.random import sample_random_requests
    from transformers import AutoTokenizer

    random.seed(SEED)
    np.random.seed(SEED)
    rows: list[Any] = sample_random_requests(
        input_len=load.prompt_tokens,
        output_len=load.response_tokens,
        num_prompts=load.requests,
        range_ratio=1.0,
        tokenizer=AutoTokenizer.from_pretrained(model),
        dataset_path="",
        random_sample=False,
        return_text=False,
    )
    return [Draw(i, Prompt("", array("i", row.prompt))) for i, row in enumerate(rows)]


@contextmanager
def running_router(plan: JobPlan) -> Iterator[RouterServer]:
    """The router of an attempt, started."""
    server = RouterServer(plan)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def _flush(engine: RunningEngine) -> None:
    async with engine.client() as client:
        await client.flush_cache()


def _raise(error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=24)
    arguments = parser.parse_args()
    load = Load(arguments.requests, arguments.prompt_tokens, arguments.response_tokens)
    prompts = same_prompts(load, arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        plan = model_plan(arguments.model, Path(scratch) / "run")
        with (
            running_engine(plan) as engine,
            running_router(plan) as server,
            mock.patch.dict(os.environ, OPENAI_API_KEY=engine.keys.api_key),
        ):
            print(f"engine started in {engine.started_s:.1f} s", flush=True)
            pairs = alternate(
                f"{load.requests} × {load.response_tokens} tokens: our client; SGLang's bench",
                "tokens/s",
                lambda: asyncio.run(ours(engine, server, load, prompts)),
                lambda: theirs(engine, load, Path(scratch) / "results.jsonl"),
            )
    print(table([pairs]))


if __name__ == "__main__":
    main()
