"""One real engine of a profile, as a run has it, without a run around it."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime_hpc.plan import JobPlan, new_plan
from slime_hpc.records import write_json
from slime_hpc.rollout.client import EngineClient, EngineKeys
from slime_hpc.rollout.engine import EngineServer
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.load import load_profile
from slime_hpc.types import WeightVersion

HOST = "127.0.0.1"
PROFILE = Path(__file__).parents[1] / "examples" / "smollm2" / "profile.yaml"
START_DEADLINE_S = 600.0
FIRST_VERSION = WeightVersion(1, 0)


@dataclass(frozen=True)
class RunningEngine:
    plan: JobPlan
    server: EngineServer
    keys: EngineKeys
    started_s: float
    """From the process's start to its first token."""

    def client(self) -> EngineClient:
        return EngineClient(self.server.url, self.keys)


def model_plan(model: Path, run_dir: Path) -> JobPlan:
    """The smollm2 example's, for the model in this directory. Its engine says it has version FIRST_VERSION."""
    profile = load_profile(PROFILE, sets=[f"model.hf_checkpoint={model.absolute()}", f"run_dir={run_dir}"])
    plan = new_plan(profile)
    rollout = plan.spec.rollout.model_copy(update={"sglang": {"weight_version": str(FIRST_VERSION)}})
    return plan.model_copy(update={"spec": plan.spec.model_copy(update={"rollout": rollout})})


@contextmanager
def running_engine(plan: JobPlan) -> Iterator[RunningEngine]:
    """Engine 0 of a plan, healthy; its processes are gone afterwards."""
    attempt = RunDir(plan.run_dir).attempt(plan.attempt)
    attempt.secrets.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = EngineKeys(secrets.token_hex(32), secrets.token_hex(32))
    write_json(attempt.engine_keys, dataclasses.asdict(keys), mode=0o600)
    server = EngineServer(plan, 0, HOST)
    began = time.monotonic()
    server.start()
    try:
        server.wait_healthy(START_DEADLINE_S)
        yield RunningEngine(plan, server, keys, time.monotonic() - began)
    finally:
        server.kill()
