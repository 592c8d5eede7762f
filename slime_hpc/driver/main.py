"""The driver's process: one thread runs the loop, another decides what a fault means and ends in time.

Calls into Ray may block for good when a node dies, so the deciding thread makes none.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_hpc.driver.actors import kill_actor
from slime_hpc.driver.bring_up import bring_up
from slime_hpc.driver.deadline import say
from slime_hpc.driver.engines import Engines
from slime_hpc.driver.health import Evidence, Fault, fault_of_loop
from slime_hpc.driver.record import RunRecorder
from slime_hpc.driver.start import find_start, first_round
from slime_hpc.errors import ClusterError, RunFailed
from slime_hpc.loop import run_rounds
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog, read_json, restrict_umask, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.supervisor.address import node_name, own_address
from slime_hpc.supervisor.cause import Cause, Ending
from slime_hpc.supervisor.control import ControlServer, send
from slime_hpc.supervisor.signals import block_notices_for_good, watch_blocked_notices
from slime_hpc.types import Role

SETTLE_S = 2.0
"""After the first fault: time for a better witness to speak."""


class Stop:
    """The supervisor ends the attempt, and needs no explanation from us."""


class Driver:
    """One attempt's driver."""

    def __init__(self, plan: JobPlan, run: RunDir) -> None:
        self._plan = plan
        self._run = run
        self._attempt = run.attempt(plan.attempt)
        self._log = EventLog(run.events, attempt=plan.attempt, who="driver")
        self._inbox: queue.Queue[Fault | Ending | Stop] = queue.Queue()
        self._token = self._attempt.control_token.read_text(encoding="utf-8")
        self._engines: Engines | None = None

    def run(self) -> int:
        """Exit code: 0 finished, 3 not."""
        self._listen()
        threading.Thread(target=self._train, name="loop", daemon=True).start()
        first = self._inbox.get()
        if isinstance(first, Stop):
            return RunFailed.exit_code
        ending = self._settle(first) if isinstance(first, Fault) else first
        if ending.cause is not Cause.FINISHED:
            self._log("attempt_failed", **asdict(ending))
            self._report_alive(ending)
        write_json(self._attempt.outcome, asdict(ending))
        say(f"{ending.cause}: {ending.detail}")
        return 0 if ending.cause is Cause.FINISHED else RunFailed.exit_code

    def _listen(self) -> None:
        nodes = read_json(self._attempt.allocation)
        host = own_address(nodes[Role.ROLLOUT][0])
        server = ControlServer(host, self._token, self._handle)
        watch_blocked_notices(lambda notice: self._log("notice", signal=notice.name))
        address = {"node": node_name(), "pid": os.getpid(), "control": server.address}
        write_json(self._attempt.driver_control, address)
        self._log("driver_started", **address)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "stop":
            self._log("stop", reason=message["reason"])
            self._inbox.put(Stop())
        elif kind in ("raylet_died", "raylet_failed"):
            ending = Ending(Cause.NODE_FAILURE, message["detail"], Role(message["role"]), message["node"])
            self._tell(Fault(Evidence.AGENT, ending))
        else:
            self._log(kind, **{key: value for key, value in message.items() if key != "type"})

    def _tell(self, fault: Fault) -> None:
        """An engine's node may go while others are left; a trainer's may not."""
        if fault.ending.role is Role.ROLLOUT and self._engines is not None:
            self._engines.report(fault)
        else:
            self._inbox.put(fault)

    def _train(self) -> None:
        try:
            asyncio.run(self._bring_up_and_train())
            self._inbox.put(Ending(Cause.FINISHED, f"{self._plan.spec.num_rollout} rounds; model in {self._run.model}"))
        except BaseException as error:  # noqa: BLE001 - the thread's last words, whatever they are
            self._inbox.put(fault_of_loop(error))

    async def _bring_up_and_train(self) -> None:
        try:
            await self._bring_up_and_run()
        except BaseException as error:
            self._inbox.put(fault_of_loop(error))  # at once: asyncio.run first waits for threads, which may hang
            raise

    async def _bring_up_and_run(self) -> None:
        recorder = RunRecorder(self._run, self._plan.attempt, self._plan.spec.num_rollout, self._log)
        self._engines = Engines(self._inbox.put, self._log, lambda member: kill_actor(member.actor))
        start = await asyncio.to_thread(find_start, self._run, self._log, self._plan.spec.checkpoint.interval)
        fleet = await bring_up(self._plan, self._run, self._log, self._inbox.put, self._engines, start)
        await run_rounds(fleet, recorder, self._plan.spec, first_round(start))
        await fleet.stop()

    def _settle(self, first: Fault) -> Ending:
        """The ending told by the witness nearest to the death."""
        faults = [first]
        deadline = time.monotonic() + SETTLE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                told = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(told, Fault):
                faults.append(told)
        return min(faults, key=lambda fault: fault.evidence).ending

    def _report_alive(self, ending: Ending) -> None:
        """Which other nodes still answer: what died is then known to be all that died."""
        for path in sorted(self._attempt.path.glob("node-*.json")):
            node = read_json(path)
            if node["node"] == ending.node:
                continue
            try:
                send(tuple(node["control"]), self._token, {"type": "ping"}, timeout_s=2.0)
            except ClusterError as error:
                self._log("node_silent", role=node["role"], node=node["node"], detail=str(error))
            else:
                self._log("node_alive", role=node["role"], node=node["node"])


def main(argv: list[str]) -> int:
    """``python -m slime_hpc.driver RUN_DIR ATTEMPT``, by srun on the first trainer node."""
    run_dir, attempt = argv
    block_notices_for_good()
    restrict_umask()
    run = RunDir(Path(run_dir))
    plan = JobPlan.model_validate_json(run.attempt(int(attempt)).plan.read_text(encoding="utf-8"))
    exit_code = Driver(plan, run).run()
    sys.stdout.flush()
    # Not a return: Ray's threads, or a loop stuck in a Ray call, would keep the interpreter from ending.
    os._exit(exit_code)
