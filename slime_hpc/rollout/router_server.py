"""sglang-router as a child process of the driver."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slime_hpc.errors import ClusterError, DeadlineExceeded, UserError
from slime_hpc.plan import JobPlan
from slime_hpc.records import write_json
from slime_hpc.rollout.client import GENERATE_TIMEOUT_S, EngineError, EngineKeys, RouterClient
from slime_hpc.rollout.engine import log_tail
from slime_hpc.run_dir import RunDir
from slime_hpc.supervisor.address import free_ports

HOST = "127.0.0.1"
"""Only the driver talks to it."""
START_TIMEOUT_S = 120.0
"""It takes a second, and its library's 90 MB may come from a slow file system."""
POLL_S = 0.1
UNWANTED = frozenset({"http_proxy", "https_proxy", "all_proxy", "rust_log"})
"""Variables, in either case, that would send its requests elsewhere or have it log them."""


def router_args(plan: JobPlan, port: int, metrics_port: int) -> dict[str, object]:
    """RouterArgs fields. UserError if the profile sets one that is ours to set.

    The default policy gives a request to the engine with the fewest (sglang-router's own one lets an engine get 64
    more than another, which leaves engines idle in a round that has few hundred); its record of whom it gave what is
    of no use afterwards.
    """
    defaults = {"policy": "manual", "assignment_mode": "min_load", "max_idle_secs": 60}
    owned: dict[str, object] = {
        "host": HOST,
        "port": port,
        "prometheus_host": HOST,
        "prometheus_port": metrics_port,  # left out, it is a fixed one, on which two runs of a host would collide
        "log_level": "warn",  # it logs each request twice otherwise
        "request_timeout_secs": int(GENERATE_TIMEOUT_S),
        # Whether an engine is lost, and who then makes its samples, is for the driver to decide.
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "history_backend": "none",
    }
    clash = sorted(owned.keys() & plan.spec.rollout.router.keys())
    if clash:
        raise UserError(f"rollout.router: {', '.join(clash)} cannot be set in a profile: slime-hpc sets it; remove it")
    return {**defaults, **plan.spec.rollout.router, **owned}


def router_env(inherited: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in inherited.items() if name.lower() not in UNWANTED}


class RouterServer:
    """The attempt's router, listening on this host's loopback, logging to ``attempts/N/logs/router.log``.

    The kernel ends it when the thread that called ``start`` ends.
    """

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self._attempt = RunDir(plan.run_dir).attempt(plan.attempt)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """Where it listens; set by ``start``."""

    @property
    def log(self) -> Path:
        return self._attempt.log("router")

    @property
    def pid(self) -> int:
        return self._started.pid

    def start(self) -> None:
        """Start the process; ``wait_ready`` says when it listens."""
        port, metrics_port = free_ports(HOST, 2)
        write_json(self._attempt.router_args, router_args(self._plan, port, metrics_port))
        launcher = [sys.executable, "-m", "slime_hpc.rollout.launch_router"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*launcher, str(self._attempt.router_args), str(self._attempt.engine_keys), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=router_env(os.environ),
            )
        self.url = f"http://{HOST}:{port}"

    def client(self) -> RouterClient:
        return RouterClient(self.url, EngineKeys.load(self._attempt.engine_keys))

    async def wait_ready(self, client: RouterClient) -> None:
        """ClusterError if it exits before it listens, with the end of its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if (status := self.poll()) is not None:
                raise ClusterError(f"the router ended with exit status {status} while starting\n{log_tail(self.log)}")
            try:
                return await client.ping()
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the router was not up after {START_TIMEOUT_S:.0f} s: {error}\n{log_tail(self.log)}"
                    ) from error
                await asyncio.sleep(POLL_S)  # no listener yet: what waiting is for

    def poll(self) -> int | None:
        """Its exit status (-9 if killed by SIGKILL), None while it runs."""
        return self._started.poll()

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL, since it has nothing to lose; SIGTERM it does not get, inside a job."""
        self._started.kill()
        self._started.wait(timeout_s)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the router has not been started")
        return self._process
