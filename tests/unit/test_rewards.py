"""Rewards in killable workers: values, and what failing functions get."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime_hpc.errors import UserError
from slime_hpc.rewards.pool import RewardError, RewardPool
from slime_hpc.rewards.worker import Args
from slime_hpc.rollout.data import load_prompts
from slime_hpc.spec.run import RM_TYPES, Data, Reward
from slime_hpc.types import Sample

MODULE = """
import asyncio, os, pathlib, time
CONSTANT = 1

def share(args, sample):
    sample.metadata["seen"] = sample.label
    return sum(t in args.targets for t in sample.response_tokens) / sample.response_length

async def later(args, sample):
    await asyncio.sleep(0.01)
    return sample.index * 2

def broken(args, sample):
    raise ValueError("no answer in " + repr(sample.response))

def hangs(args, sample):
    pathlib.Path(args.pid_file).write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)

def dies(args, sample):
    os._exit(7)

def text(args, sample):
    return "1.0"

def not_finite(args, sample):
    return float("nan")

def writes(args, sample):
    args.targets = []
    return 0.0

def unjson(args, sample):
    sample.metadata["seen"] = {1, 2}
    return 0.0
"""

SLOW_MODULE = """
import time
time.sleep(2)

def zero(args, sample):
    return 0.0
"""


@pytest.fixture(scope="module")
def profile_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profile")
    (directory / "my_rewards.py").write_text(MODULE)
    (directory / "slow_to_import.py").write_text(SLOW_MODULE)
    (directory / "typo.py").write_text("import not_installed_anywhere\n")
    return directory


def samples(count: int) -> list[Sample]:
    return [
        Sample(0, i, "p", tokens=[1, 2, 10, i], response="xy", response_length=2, label=f"l{i}") for i in range(count)
    ]


def score(profile_dir: Path, function: str, batch: list[Sample], timeout_s: float = 20.0, **args: object) -> None:
    reward = Reward(custom_rm_path=f"my_rewards.{function}", timeout_s=timeout_s)
    with RewardPool(reward, profile_dir, workers=1) as pool:
        asyncio.run(pool.score(batch, Args(targets=[10, 2], **args)))


def test_rewards_and_metadata_arrive_in_their_samples(profile_dir: Path) -> None:
    batch = samples(3)
    score(profile_dir, "share", batch)
    assert [s.reward for s in batch] == [0.5, 0.5, 1.0]
    assert [s.metadata for s in batch] == [{"seen": "l0"}, {"seen": "l1"}, {"seen": "l2"}]


def test_async_functions_are_awaited(profile_dir: Path) -> None:
    batch = samples(3)
    score(profile_dir, "later", batch)
    assert [s.reward for s in batch] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("broken", "(?s)reward my_rewards.broken failed on sample 0 .*my_rewards.py.*ValueError: no answer in 'xy'"),
        ("dies", r"failed on sample 0 \(prompt 0\): its process died \(exit code 7\)"),
        ("text", "returned '1.0', not a finite number"),
        ("not_finite", "returned nan, not a finite number"),
        ("writes", "AttributeError: args.targets is read-only"),
        ("unjson", "left metadata that is no JSON value: Object of type set is not JSON serializable"),
    ],
)
def test_a_failing_function_is_named_with_its_sample(profile_dir: Path, function: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        score(profile_dir, function, samples(2))


def test_the_seconds_of_an_import_are_no_samples(profile_dir: Path) -> None:
    batch = samples(4)
    with RewardPool(Reward(custom_rm_path="slow_to_import.zero", timeout_s=0.5), profile_dir, workers=2) as pool:
        asyncio.run(pool.score(batch, Args()))
    assert [sample.reward for sample in batch] == [0.0] * 4


def test_a_sample_that_hangs_is_killed_at_its_limit(profile_dir: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"failed on sample 0 .*took longer than reward.timeout_s = 0.5 s"):
        score(profile_dir, "hangs", samples(1), timeout_s=0.5, pid_file=str(tmp_path / "pid"))
    assert time.monotonic() - started < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


HOLD_A_HANGING_WORKER = """
import asyncio, sys
from pathlib import Path
from slime_hpc.rewards.pool import RewardPool
from slime_hpc.rewards.worker import Args
from slime_hpc.spec.run import Reward
from slime_hpc.types import Sample
if __name__ == "__main__":
    pool = RewardPool(Reward(custom_rm_path="my_rewards.hangs", timeout_s=600), Path(sys.argv[1]), workers=1)
    asyncio.run(pool.score([Sample(0, 0, "p")], Args(pid_file=sys.argv[2])))
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_busy_worker_does_not_outlive_its_parent(profile_dir: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    holder = subprocess.Popen([sys.executable, "-c", HOLD_A_HANGING_WORKER, str(profile_dir), str(pid_file)])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
        worker = int(pid_file.read_text())
        assert is_alive(worker)
    finally:
        holder.kill()
        holder.wait()
    wait_until(lambda: not is_alive(worker))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("my_rewards.shares", "(?s)cannot use 'my_rewards.shares': .*has no attribute 'shares'"),
        ("my_reward.share", "No module named 'my_reward'"),
        ("typo.f", "(?s)typo.py.*No module named 'not_installed_anywhere'"),
        ("share", "not of the form module.function"),
        ("my_rewards.CONSTANT", "my_rewards.CONSTANT is a int, not a function"),
    ],
)
def test_check_finds_typos(profile_dir: Path, path: str, says: str) -> None:
    with RewardPool(Reward(custom_rm_path=path), profile_dir, workers=1) as pool, pytest.raises(UserError, match=says):
        pool.check()


@pytest.mark.parametrize("reward", [{"custom_rm_path": "my_rewards.later"}, *({"rm_type": name} for name in RM_TYPES)])
def test_check_accepts_good_ones(profile_dir: Path, reward: dict[str, str]) -> None:
    with RewardPool(Reward(**reward), profile_dir, workers=1) as pool:
        pool.check()


def verified(rm_type: str, batch: list[Sample], timeout_s: float = 30.0) -> tuple[list[float | None], list[Sample]]:
    """Their rewards, and those that could not be verified."""
    with RewardPool(Reward(rm_type=rm_type, timeout_s=timeout_s), Path("/"), workers=1) as pool:
        unverified = asyncio.run(pool.score(batch, Args()))
    return [sample.reward for sample in batch], unverified


MATH = [
    ("42", r"So the answer is \boxed{42}.", 1),
    ("42", "42<|im_end|>", 1),
    (42, "The answer is 42.", 1),
    ("42", "The answer is 41.", 0),
    ("42", "40, 41, 42, 43", 0),
    ("42", r"\boxed{42, 43}", 0),
    ("42", r"\boxed{41}, no: \boxed{42}", 1),
    ("42", r"\boxed{42}, no: \boxed{41}", 0),
    ("42", "", 0),
    ("42", r"\boxed{", 0),
    (r"\frac{1}{2}", r"\boxed{0.5}", 1),
    ("x^2+1", "$1 + x^2$", 1),
    ("-4", "= -4", 1),
    ("1,000", "1000", 1),
]


def test_math_compares_the_last_answer_as_mathematics() -> None:
    batch = [Sample(i, i, "p", response=response, label=label) for i, (label, response, _) in enumerate(MATH)]
    assert verified("math", batch) == ([expected for _, _, expected in MATH], [])


def test_an_answer_that_cannot_be_verified_in_time_gets_nothing_and_is_told() -> None:
    endless = Sample(0, 0, "p", response=r"\boxed{9^{9^{9^{9^9}}}}", label="7")
    easy = Sample(0, 1, "p", response="7", label="7")
    rewards, unverified = verified("math", [endless, easy], timeout_s=3.0)
    assert (rewards, unverified) == ([0, 1], [endless])
    assert "reward.timeout_s = 3 s" in endless.metadata["unverified"]


def test_an_answer_that_a_verifier_chokes_on_gets_nothing_and_is_told() -> None:
    recipe = {"dataset": "prime_factorization", "size": 1, "seed": 5}
    prompts = load_prompts(Data(reasoning_gym=recipe), NoTokens(), max_tokens=0).prompts  # type: ignore[arg-type]
    said = Sample(0, 0, "p", response="The factors are two and three", label=prompts[0].label)
    said.metadata = dict(prompts[0].metadata)
    rewards, unverified = verified("reasoning_gym", [said])
    assert (rewards, unverified) == ([0], [said])
    assert "ValueError" in said.metadata["unverified"]


def test_a_label_without_an_answer_is_an_error() -> None:
    with pytest.raises(RewardError, match="finds no answer in the label ''"):
        verified("math", [Sample(0, 0, "p", response="1", label="")])


class NoTokens:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "decimal_arithmetic", "rearc", "countdown"])
def test_reasoning_gym_asks_the_verifier_of_the_task(dataset: str) -> None:
    data = Data(reasoning_gym={"dataset": dataset, "size": 3, "seed": 5})
    prompts = load_prompts(data, NoTokens(), max_tokens=0).prompts  # type: ignore[arg-type]

    def answered(form: str) -> list[Sample]:
        return [
            Sample(0, 0, p.text, response=form.format(p.label), label=p.label, metadata=p.metadata) for p in prompts
        ]

    batch = [*answered("{}"), *answered("<answer>no</answer> Let me see: <answer>{}</answer>"), *answered("no idea")]
    rewards, _ = verified("reasoning_gym", batch)
    assert rewards[:6] == [1] * 6
    assert all(reward is not None and reward < 0.1 for reward in rewards[6:])
