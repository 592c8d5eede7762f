"""What the router is started with, and what its end means."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.driver.health import Evidence, Fault, fault_of_loop, watch_router
from slime_hpc.errors import UserError
from slime_hpc.plan import JobPlan, plan_job
from slime_hpc.rollout.client import EngineError, RouterError
from slime_hpc.rollout.router_server import RouterServer, router_args, router_env
from slime_hpc.spec.load import load_profile
from slime_hpc.supervisor.cause import Cause
from slime_hpc.types import Role


@pytest.fixture
def plan(quickstart: Path) -> Callable[..., JobPlan]:
    def plan(**router: Any) -> JobPlan:
        profile = load_profile(quickstart)
        rollout = profile.spec.rollout.model_copy(update={"router": router})
        spec = profile.spec.model_copy(update={"rollout": rollout})
        return plan_job(spec, profile.cluster, token="t", profile_dir=profile.directory, python="python")

    return plan


def test_the_profile_goes_over_our_defaults_and_not_over_what_is_ours(plan: Callable[..., JobPlan]) -> None:
    args = router_args(plan(policy="cache_aware", cache_threshold=0.5), 4000, 4001)
    assert (args["policy"], args["cache_threshold"], args["assignment_mode"]) == ("cache_aware", 0.5, "min_load")
    assert (args["host"], args["port"], args["prometheus_host"], args["prometheus_port"]) == (
        *("127.0.0.1", 4000),
        *("127.0.0.1", 4001),
    )
    assert router_args(plan(), 1, 2)["policy"] == "manual"
    with pytest.raises(UserError, match=r"rollout.router: disable_retries, port cannot be set"):
        router_args(plan(port=1, disable_retries=False), 1, 2)


def test_its_requests_pass_by_the_sites_proxy() -> None:
    inherited = {"HTTP_PROXY": "http://p", "https_proxy": "http://p", "ALL_PROXY": "x", "RUST_LOG": "trace", "A": "b"}
    assert router_env(inherited) == {"A": "b"}


@dataclasses.dataclass
class EndedRouter:
    status: int
    log: str = "/runs/r/attempts/0001/logs/router.log"

    def poll(self) -> int:
        return self.status


def test_its_end_is_told_and_named() -> None:
    told: list[Fault] = []
    asyncio.run(watch_router(EndedRouter(-9), told.append))  # type: ignore[arg-type]
    (fault,) = told
    assert (fault.evidence, fault.ending.cause, fault.ending.role) == (Evidence.PROCESS, Cause.CRASHED, Role.DRIVER)
    assert "the router" in fault.ending.detail and "SIGKILL" in fault.ending.detail


def test_the_routers_silence_is_not_an_engines() -> None:
    assert fault_of_loop(RouterError("u", "/generate", "refused")).ending.role is Role.DRIVER
    assert fault_of_loop(EngineError("u", "/generate", "refused")).ending.role is Role.ROLLOUT


def test_it_dies_with_the_process_that_holds_it(plan: Callable[..., JobPlan], tmp_path: Path) -> None:
    held = plan().model_copy(update={"run_dir": tmp_path})
    attempt = RouterServer(held)._attempt
    attempt.secrets.mkdir(parents=True)
    attempt.engine_keys.write_text('{"api_key": "k1", "admin_api_key": "k2"}')
    (tmp_path / "plan.json").write_text(held.model_dump_json(by_alias=True))
    code = (
        "import sys, pathlib; from slime_hpc.plan import JobPlan;"
        "from slime_hpc.rollout.router_server import RouterServer;"
        "s = RouterServer(JobPlan.model_validate_json(pathlib.Path(sys.argv[1]).read_text()));"
        "s.start(); print(s.pid, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "plan.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    router = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    deadline = 10.0
    while _is_alive(router):
        deadline -= 0.1
        assert deadline > 0
        asyncio.run(asyncio.sleep(0.1))


def _is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
