"""A real SGLang server: what it generates, who may ask it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from serving import HOST, KEYS, START_DEADLINE_S, Engine, WeightGroup, make_attempt, make_plan

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.rollout.client import EngineClient, EngineError, EngineKeys, RouterError
from slime_hpc.rollout.data import Draw, Prompt
from slime_hpc.rollout.engine import EngineServer
from slime_hpc.rollout.generate import generate_groups
from slime_hpc.spec.run import Sampling
from slime_hpc.types import SampleStatus

TOLERANCE = 1e-5
EOS = 2
"""The tiny model's end-of-sequence token."""

TEXT = {"skip_special_tokens": False, "no_stop_trim": False}

START_AND_WAIT = """
import json, sys, time
from pathlib import Path
from slime_hpc.plan import JobPlan
from slime_hpc.rollout.engine import EngineServer
server = EngineServer(JobPlan.model_validate_json(Path(sys.argv[1]).read_text()), 0, "127.0.0.1")
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def draws(count: int) -> list[Draw]:
    return [Draw(10 + i, Prompt(f"prompt {i}", (5, 17, 42 + i), label=i)) for i in range(count)]


def sampling(length: int, n: int = 1, **options: float | bool) -> Sampling:
    return Sampling.model_validate(
        {"rollout_batch_size": 1, "n_samples_per_prompt": n, "rollout_max_response_len": length, **options}
    )


def family(pid: int) -> list[psutil.Process]:
    main = psutil.Process(pid)
    return [main, *main.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_transformers(engine: Engine, temperature: float) -> None:
    prompt = [5, 17, 42, 99, 250]

    async def generate() -> None:
        async with engine.client() as client:
            params = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
            done = await client.generate(prompt, params)
        assert (len(done.tokens), done.finish_reason) == (24, "length")
        expected = engine.reference_log_probs([*prompt, *done.tokens], 24, temperature)
        assert done.log_probs == pytest.approx(expected, abs=TOLERANCE)

    asyncio.run(generate())


def test_through_the_router_it_says_the_same(weights: WeightGroup) -> None:
    prompt, params = [5, 17, 42], {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, **TEXT}

    async def both() -> None:
        async with weights.engine.client() as client, weights.engine.routed() as router:
            direct, routed = await client.generate(prompt, params), await router.generate(prompt, params)
        assert (routed.tokens, routed.text, routed.finish_reason) == (direct.tokens, direct.text, "length")
        assert routed.log_probs == pytest.approx(direct.log_probs, abs=TOLERANCE)
        assert routed.weight_version == direct.weight_version == str(weights.version)

    asyncio.run(both())


def test_a_withdrawn_request_frees_the_engine(weights: WeightGroup) -> None:
    async def withdraw() -> None:
        async with weights.engine.client() as client, weights.engine.routed() as router:
            params = {"max_new_tokens": 450, "ignore_eos": True}
            tasks = [asyncio.create_task(router.generate([5, i], params)) for i in range(4)]
            await asyncio.sleep(0.3)
            assert await router.busy() == [client.url]
            for task in tasks:
                task.cancel()
            deadline = time.monotonic() + 10
            while True:
                try:
                    return await client.flush_cache()  # refused while a request is running
                except EngineError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)

    asyncio.run(withdraw())


def test_a_round_of_groups(weights: WeightGroup) -> None:
    engine = weights.engine
    seen: list[tuple[int, int]] = []

    async def generate() -> None:
        async with engine.routed() as router:
            groups = await generate_groups(
                router,
                draws(3),
                sampling(12, n=4, ignore_eos=True),
                deadline_s=60,
                progress=lambda done, total: seen.append((done, total)),
            )
        assert [[s.index for s in group] for group in groups] == [[40, 41, 42, 43], [44, 45, 46, 47], [48, 49, 50, 51]]
        assert [[s.group_index for s in group] for group in groups] == [[10] * 4, [11] * 4, [12] * 4]
        for i, group in enumerate(groups):
            assert len({tuple(s.response_tokens) for s in group}) == 4, "samples of one prompt differ"
            for sample in group:
                assert sample.tokens[:3] == [5, 17, 42 + i]
                assert (sample.prompt, sample.label) == (f"prompt {i}", i)
                assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 12)
                assert sample.loss_mask == [1] * 12
                assert sample.weight_version == weights.version
                assert sample.rollout_log_probs == pytest.approx(
                    engine.reference_log_probs(sample.tokens, 12), abs=TOLERANCE
                )

    asyncio.run(generate())
    assert seen == [(done, 12) for done in range(1, 13)]


def test_samples_end_where_the_model_ends_them(weights: WeightGroup) -> None:
    async def generate() -> None:
        async with weights.engine.routed() as router:
            (group,) = await generate_groups(router, draws(1), sampling(400, n=16), deadline_s=120)
        for sample in group:
            ended = sample.response_tokens[-1] == EOS
            assert sample.status is (SampleStatus.COMPLETED if ended else SampleStatus.TRUNCATED)
            assert EOS not in sample.response_tokens[:-1]
            assert ended or sample.response_length == 400
            assert len(sample.rollout_log_probs) == sample.response_length
        assert any(sample.status is SampleStatus.COMPLETED for sample in group)

    asyncio.run(generate())


def test_an_aborted_sample_keeps_what_it_has(weights: WeightGroup) -> None:
    async def abort() -> None:
        async with weights.engine.client() as client, weights.engine.routed() as router:
            running = asyncio.create_task(
                generate_groups(router, draws(1), sampling(400, ignore_eos=True), deadline_s=60)
            )
            await asyncio.sleep(0.5)
            await client.abort_all()
            ((sample,),) = await running
        assert sample.status is SampleStatus.ABORTED
        assert 0 < sample.response_length < 400
        expected = weights.engine.reference_log_probs(sample.tokens, sample.response_length)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=TOLERANCE)

    asyncio.run(abort())


def test_a_missed_deadline_names_the_engine_and_frees_it(weights: WeightGroup) -> None:
    async def late() -> None:
        url = weights.engine.server.url
        async with weights.engine.routed() as router:
            with pytest.raises(DeadlineExceeded, match=f"2 of 2 samples were missing after 0 s, from {url}"):
                await generate_groups(router, draws(2), sampling(450, ignore_eos=True), deadline_s=0.3)
            groups = await generate_groups(router, draws(2), sampling(4, ignore_eos=True), deadline_s=60)
        assert [len(group) for group in groups] == [1, 1]

    asyncio.run(late())


def test_a_refused_request_quotes_the_engine(weights: WeightGroup) -> None:
    async def refused() -> None:
        async with weights.engine.routed() as router:
            with pytest.raises(EngineError, match=r"answered 400 to /generate: .*context length") as caught:
                await generate_groups(router, draws(2), sampling(4000), deadline_s=60)
        assert not caught.value.is_transient and not isinstance(caught.value, RouterError)

    asyncio.run(refused())


def test_generation_waits_while_paused(weights: WeightGroup) -> None:
    async def pause() -> None:
        async with weights.engine.client() as client:
            await client.pause_generation()
            waiting = asyncio.create_task(client.generate([1, 2, 3], {"max_new_tokens": 1}))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await client.continue_generation()
            assert len((await waiting).tokens) == 1
            await client.flush_cache()

    asyncio.run(pause())


NO_KEY = EngineKeys("", "")
WRONG_KEYS = EngineKeys("user-key-0000", "admin-key-0000")
SWAPPED = EngineKeys(KEYS.admin_api_key, KEYS.api_key)


@pytest.mark.parametrize("keys", [NO_KEY, WRONG_KEYS, SWAPPED], ids=["none", "wrong", "swapped"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.generate([1], {}),
        EngineClient.server_info,
        EngineClient.weight_version,
        EngineClient.pause_generation,
        EngineClient.flush_cache,
        EngineClient.abort_all,
        EngineClient.begin_weight_update,
    ],
)
def test_nothing_is_done_without_the_right_key(
    engine: Engine, keys: EngineKeys, ask: Callable[[EngineClient], Awaitable[object]]
) -> None:
    async def refused() -> None:
        async with EngineClient(engine.server.url, keys) as client:
            with pytest.raises(EngineError, match="Unauthorized") as caught:
                await ask(client)
        assert caught.value.status == 401

    asyncio.run(refused())


def test_the_keys_are_nowhere_but_in_their_file(engine: Engine) -> None:
    async def server_info() -> str:
        async with engine.client() as client:
            return json.dumps(await client.server_info())

    async def workers() -> str:
        async with engine.routed(), engine.router.client() as api:
            return json.dumps(await api._workers())

    processes = [*family(engine.server.pid), *family(engine.router.pid)]
    assert len(processes) >= 4
    shown = {
        "server info": asyncio.run(server_info()),
        "log": engine.server.log.read_text(),
        "arguments file": engine.attempt.engine_args(0).read_text(),
        "router's engines": asyncio.run(workers()),
        "router's log": engine.router.log.read_text(),
        "router's arguments": engine.attempt.router_args.read_text(),
        "argv": " ".join(word for p in processes for word in p.cmdline()),
        "environment": json.dumps([p.environ() for p in processes]),
    }
    assert "server_args=" in shown["log"], "this is where SGLang would show them"
    for place, text in shown.items():
        assert KEYS.api_key not in text, place
        assert KEYS.admin_api_key not in text, place


def listening(pid: int) -> list[str]:
    found = [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [f"http://{a.ip}:{a.port}" for a in found]


def test_it_serves_on_the_given_address_only(engine: Engine) -> None:
    assert listening(engine.server.pid) == [engine.server.url]


def test_the_router_listens_on_loopback_at_ports_of_its_own(engine: Engine) -> None:
    args = json.loads(engine.attempt.router_args.read_text())
    wanted = {engine.router.url, f"http://127.0.0.1:{args['prometheus_port']}"}
    assert set(listening(engine.router.pid)) == wanted
    assert engine.router.url.startswith("http://127.0.0.1:")


def test_they_stay_in_the_process_group_that_a_job_ends(engine: Engine) -> None:
    both = [*family(engine.server.pid), *family(engine.router.pid)]
    assert {os.getpgid(p.pid) for p in both} == {os.getpgid(0)}


def test_an_engine_that_cannot_start_says_why(tiny_model: Path, tmp_path: Path) -> None:
    make_attempt(tmp_path)
    server = EngineServer(make_plan(tmp_path, tiny_model, context_lenght=64), 0, HOST)
    server.start()
    with pytest.raises(ClusterError, match=r"(?s)engine 0 on 127.0.0.1 ended with exit status 1 .*context_lenght"):
        server.wait_healthy(START_DEADLINE_S)
    assert server.poll() == 1


def test_an_engine_dies_with_the_process_that_holds_it_even_while_it_starts(tiny_model: Path, tmp_path: Path) -> None:
    make_attempt(tmp_path)
    (tmp_path / "plan.json").write_text(make_plan(tmp_path, tiny_model).model_dump_json(by_alias=True))
    holder = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(tmp_path / "plan.json")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        main = int(holder.stdout.readline())
        deadline = time.monotonic() + START_DEADLINE_S
        while len(engine_processes := family(main)) < 4:  # main, resource tracker, scheduler, detokenizer
            assert time.monotonic() < deadline, "its processes did not start"
            time.sleep(0.2)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(p) for p in engine_processes):
        assert time.monotonic() < deadline, [p for p in engine_processes if is_alive(p)]
        time.sleep(0.1)
