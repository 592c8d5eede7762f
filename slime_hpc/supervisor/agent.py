"""Our process on every node: starts its raylet, passes Slurm's notices on, reports a death, ends the node."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog, read_json, restrict_umask, write_json
from slime_hpc.run_dir import AttemptDir, RunDir
from slime_hpc.supervisor.address import free_ports, node_name, own_address
from slime_hpc.supervisor.cause import describe_exit
from slime_hpc.supervisor.control import ControlServer, send
from slime_hpc.supervisor.raylet import RayletConfig, start_raylet
from slime_hpc.supervisor.signals import block_notices, watch_blocked_notices
from slime_hpc.supervisor.sweep import adopt_orphans, descendants, end_descendants, end_tagged, tag
from slime_hpc.types import Role

HEAD_TIMEOUT_S = 300.0
"""For the head's GCS to listen, cold imports over a shared file system included."""
RAY_TIMEOUT_S = 300.0
POLL_S = 0.2
T = TypeVar("T")


RAY_TRIES = 4
RAY_STARTED = b"Ray runtime started"


class RayStartFailed(ClusterError):
    """`ray start` ended before the node was up."""


class StopRequested(Exception):
    """The supervisor wants this node ended."""


class Agent:
    """One node of one attempt. It has one role or, on the only host, all of them, and its end is then the first's."""

    def __init__(self, plan: JobPlan, attempt: AttemptDir, roles: Sequence[Role]) -> None:
        self._plan = plan
        self._attempt = attempt
        self._roles = roles
        self._role = roles[0]
        self._parent = os.getppid()
        self._node = node_name()
        nodes: dict[str, list[str]] = read_json(attempt.allocation)
        head, first_rollout = nodes[Role.TRAINER][0], nodes[Role.ROLLOUT][0]
        self._is_head = self._node == head
        self._host = own_address(first_rollout if self._is_head else head)
        self._tag = tag(plan.token, plan.attempt, self._node)
        self._log = EventLog(attempt.events(f"agent-{self._node}"), attempt=plan.attempt, who=f"agent-{self._node}")
        self._temp_dir = Path(plan.cluster.scratch) / f"shpc-{hashlib.sha256(self._tag.encode()).hexdigest()[:12]}"
        self._stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._control_token = attempt.control_token.read_text(encoding="utf-8")
        self._control = ControlServer(self._host, self._control_token, self._handle)

    def run(self) -> int:
        """Until told to stop (0), or the raylet is gone (1)."""
        self._temp_dir.mkdir(mode=0o700)
        adopt_orphans()
        try:
            raylet = self._start()
            watch_blocked_notices(self._pass_on)
            return self._watch(raylet)
        except StopRequested as request:
            self._log("stopping", reason=str(request))
            return 0
        except ClusterError as error:
            self._report("raylet_failed", str(error))
            return 1
        finally:
            left = end_descendants(timeout_s=5.0) + end_tagged(self._tag, timeout_s=2.0)
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._log("swept", left=left)

    def _start(self) -> subprocess.Popen[bytes]:
        """A running raylet. Ray gives up a node that takes long to start, so it is given several tries."""
        for number in range(1, RAY_TRIES):
            try:
                return self._try_start()
            except RayStartFailed as error:
                self._log("ray_start_failed", number=number, of=RAY_TRIES, detail=str(error))
                end_descendants(timeout_s=5.0)
        return self._try_start()

    def _try_start(self) -> subprocess.Popen[bytes]:
        (gcs_port,) = free_ports(self._host, 1)
        log = self._attempt.log(f"ray-{self._node}")
        seen = log.stat().st_size if log.exists() else 0
        process = start_raylet(
            RayletConfig(
                host=self._host,
                head=None if self._is_head else self._await_head(),
                gcs_port=gcs_port,
                cpus=max(self._plan.component(role).cpus_per_task for role in self._roles),
                resources={role.value: self._places(role) for role in self._roles},
                temp_dir=self._temp_dir,
                token_file=self._attempt.ray_token,
                tag=self._tag,
                variables=self._plan.variables,
            ),
            log,
        )
        self._await(lambda: self._has_started(process, log, seen), "the start of Ray", RAY_TIMEOUT_S)
        if self._is_head:
            write_json(self._attempt.ray_head, {"address": f"{self._host}:{gcs_port}"})
        (raylet,) = descendants(process.pid, ["raylet"])
        pids = {"agent": os.getpid(), "ray_start": process.pid, "raylet": raylet.pid}
        write_json(
            self._attempt.node(self._node),
            {"node": self._node, "role": self._role, "host": self._host, "control": self._control.address, **pids},
        )
        self._log("raylet_up", role=self._role, host=self._host, temp_dir=str(self._temp_dir), **pids)
        return process

    def _places(self, role: Role) -> int:
        return self._plan.trainer.processes_per_node if role is Role.TRAINER else self._plan.engines_per_node

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        while True:
            self._obey()
            if (returncode := process.poll()) is not None:
                how, log = describe_exit(returncode), self._attempt.log(f"ray-{self._node}")
                self._report("raylet_died", f"the raylet of {self._node} ended ({how}); see {log}")
                return 1
            time.sleep(POLL_S)

    def _handle(self, message: dict[str, Any]) -> None:
        if message["type"] == "stop":
            self._stops.put(message["reason"])

    def _obey(self) -> None:
        if os.getppid() != self._parent:
            raise StopRequested("the process that started this agent is gone")
        if not self._stops.empty():
            raise StopRequested(self._stops.get())

    def _report(self, event: str, detail: str) -> None:
        """Log it, and tell the driver, whose decision it is."""
        self._log(event, role=self._role, node=self._node, detail=detail)
        self._tell_driver({"type": event, "role": self._role, "node": self._node, "detail": detail})

    def _pass_on(self, notice: signal.Signals) -> None:
        self._log("notice", signal=notice.name)
        write_json(self._attempt.notice(self._node), {"signal": notice.name, "time": time.time()})
        self._tell_driver({"type": "notice", "node": self._node, "signal": notice.name})

    def _tell_driver(self, message: dict[str, Any]) -> None:
        try:
            host, port = read_json(self._attempt.driver_control)["control"]
            send((host, port), self._control_token, message)
        except (OSError, ClusterError) as error:
            self._log("driver_not_told", error=str(error))  # it has ended, or sees for itself; the event stands

    def _await_head(self) -> str:
        def address() -> str | None:
            return str(read_json(self._attempt.ray_head)["address"]) if self._attempt.ray_head.exists() else None

        return self._await(address, "the address of the Ray head", HEAD_TIMEOUT_S)

    def _has_started(self, process: subprocess.Popen[bytes], log: Path, seen: int) -> bool:
        """Whether `ray start` says so: the node is then known to the head, which no process or port shows."""
        if (returncode := process.poll()) is not None:
            raise RayStartFailed(f"`ray start` ended on {self._node} ({describe_exit(returncode)}); see {log}")
        with open(log, "rb") as file:
            file.seek(seen)
            return RAY_STARTED in file.read()

    def _await(self, look: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """What ``look()`` returns once it is not empty; StopRequested in between."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            self._obey()
            if self._attempt.stop.exists():
                raise StopRequested(read_json(self._attempt.stop)["reason"])
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self._node}: {what} did not appear within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return found


def main(argv: list[str]) -> int:
    """``python -m slime_hpc.supervisor.agent RUN_DIR ATTEMPT ROLE…``, by srun on each node."""
    run_dir, number, *roles = argv
    block_notices()
    restrict_umask()  # srun gives a task the umask of the shell that submitted the job
    attempt = RunDir(Path(run_dir)).attempt(int(number))
    _redirect_output(attempt.log(f"agent-{node_name()}"))
    plan = JobPlan.model_validate_json(attempt.plan.read_text(encoding="utf-8"))
    try:
        return Agent(plan, attempt, [Role(role) for role in roles]).run()
    except ClusterError as error:
        log = EventLog(attempt.events(f"agent-{node_name()}"), attempt=plan.attempt, who=f"agent-{node_name()}")
        log("raylet_failed", role=roles[0], node=node_name(), detail=str(error))
        return 1


def _redirect_output(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
