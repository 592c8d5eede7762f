"""The batch host's process: starts the steps of an attempt, watches them, ends them, and says how it ended."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from slime_hpc.errors import ClusterError, RunFailed
from slime_hpc.plan import JobPlan
from slime_hpc.records import EventLog, read_json, read_jsonl, restrict_umask, write_json, write_text_atomic
from slime_hpc.run_dir import AttemptDir, RunDir
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.slurm.steps import Step
from slime_hpc.supervisor.attempts import close_predecessors, last_round_of, own_attempt
from slime_hpc.supervisor.cause import Cause, Ending, cause_of_component, cause_of_signal, describe_exit
from slime_hpc.supervisor.launch import Launcher, SlurmLauncher
from slime_hpc.supervisor.raylet import ray_auth_env
from slime_hpc.supervisor.signals import SignalInbox
from slime_hpc.supervisor.sweep import TAG, tag
from slime_hpc.supervisor.teardown import tear_down
from slime_hpc.types import Role

POLL_S = 0.2
SLURM_EXPLAINS_S = 4.0
"""After the teardown: for the other components to leave COMPLETING, which looks alike whatever the reason."""
DRIVER_EXPLAINS_S = 20.0
"""After a component's step ended: how long the driver has to say what it saw."""


def supervise(run_dir: str, attempt: int) -> None:
    """Run one attempt to its end inside its allocation, and write ``ended.json``.

    ``attempt`` is what the job was submitted for; a job that Slurm has started again makes the next. SystemExit 3 if
    it did not finish, which submitit passes on without a traceback of its own; UserError if the run is another's.
    """
    restrict_umask()
    inbox = SignalInbox.install()
    ending = run_attempt(RunDir(Path(run_dir)), attempt, SlurmLauncher(), inbox)
    print(f"slime-hpc: {ending.cause}: {ending.detail}", file=sys.stderr, flush=True)
    if ending.cause is not Cause.FINISHED:
        sys.exit(RunFailed.exit_code)


def run_attempt(run: RunDir, attempt: int, launcher: Launcher, inbox: SignalInbox) -> Ending:
    """Own an attempt and run it to its end, with processes that ``launcher`` starts; writes ``ended.json``."""
    plan = own_attempt(run, attempt, launcher.allocation)
    close_predecessors(run, plan.attempt)
    return Supervisor(plan, run, launcher, inbox).run()


class Supervisor:
    """One attempt."""

    def __init__(self, plan: JobPlan, run: RunDir, launcher: Launcher, inbox: SignalInbox) -> None:
        self._plan = plan
        self._run_dir = run
        self._attempt: AttemptDir = run.attempt(plan.attempt)
        self._inbox = inbox
        self._launcher = launcher
        self._allocation = launcher.allocation
        self._log = EventLog(self._attempt.events("supervisor"), attempt=plan.attempt, who="supervisor")
        self._steps: dict[str, subprocess.Popen[bytes]] = {}
        self._started = time.time()

    def run(self) -> Ending:
        """Start everything, watch until something ends, end the rest, write down why."""
        try:
            self._start()
            seen = self._watch()
        except Exception as error:  # noqa: BLE001 - whatever it is, the steps must be ended and the reason written down
            traceback.print_exc()
            seen = Ending(Cause.CRASHED, f"the supervisor failed: {type(error).__name__}: {error}")
        reason = seen.name if isinstance(seen, signal.Signals) else seen.detail
        tear_down(self._attempt, self._plan.token, self._steps, self._log, reason)
        ending = self._ending_of_signal(seen) if isinstance(seen, signal.Signals) else self._second_guess(seen)
        self._write_ended(ending)
        return ending

    def _start(self) -> None:
        self._write_secrets()
        nodes = {c.role: self._allocation.components[c.index].nodes for c in self._plan.components}
        write_json(self._attempt.allocation, {role.value: list(names) for role, names in nodes.items()})
        restarts = self._allocation.restart_count
        self._log("started", job_id=self._allocation.job_text, restart_count=restarts, nodes=nodes)
        arguments = [str(self._run_dir.path), str(self._plan.attempt)]
        for roles in self._launcher.agents:
            component = self._plan.component(roles[0])
            agent = [self._plan.engine_python, "-m", "slime_hpc.supervisor.agent", *arguments, *roles]
            self._start_step(
                Step(
                    name=component.role.value,
                    component=component.index,
                    nodes=nodes[component.role],
                    cpus_per_task=component.cpus_per_task,
                    command=agent,
                    output=self._attempt.log(f"step-{component.role.value}"),
                )
            )
        self._start_driver(nodes[Role.TRAINER][0], arguments)

    def _start_driver(self, node: str, arguments: list[str]) -> None:
        # The tag goes in by env(1), not through srun's own environment: the sweep must not find srun. It is not the
        # node's: the node's agent may end before the driver has said why, and would take it along.
        own_tag = tag(self._plan.token, self._plan.attempt, f"driver@{node}")
        environ = {TAG: own_tag, **ray_auth_env(self._attempt.ray_token)}
        tagged = ["env", *(f"{name}={value}" for name, value in environ.items())]
        self._start_step(
            Step(
                name="driver",
                component=self._plan.trainer.index,
                nodes=[node],
                cpus_per_task=1,
                command=[*tagged, self._plan.engine_python, "-m", "slime_hpc.driver", *arguments],
                output=self._attempt.log("driver"),
                overlap=True,
            )
        )

    def _start_step(self, step: Step) -> None:
        self._steps[step.name] = self._launcher.start_step(step)

    def _watch(self) -> Ending | signal.Signals:
        """Until a signal, the driver's end, or that of a step of agents."""
        while True:
            if self._inbox.first is not None:
                return self._inbox.first
            if (returncode := self._steps["driver"].poll()) is not None:
                return self._ending_of_driver(returncode)
            for roles in self._launcher.agents:
                if (returncode := self._steps[roles[0].value].poll()) is not None:
                    return self._ending_of_component(roles[0], returncode)
            time.sleep(POLL_S)

    def _ending_of_driver(self, returncode: int) -> Ending:
        if self._attempt.outcome.exists():
            said = read_json(self._attempt.outcome)
            return Ending(
                Cause(said["cause"]), said["detail"], Role(said["role"]) if said["role"] else None, said["node"]
            )
        for role in (Role.TRAINER, Role.ROLLOUT):
            if account := self._agents_account(role):
                return account
        node = self._allocation.batch_node
        detail = f"the driver on {node} ended with {describe_exit(returncode)}; see {self._attempt.log('driver')}"
        return Ending(Cause.CRASHED, detail, Role.DRIVER, node)

    def _ending_of_component(self, role: Role, returncode: int) -> Ending:
        """The driver knows more of it than we do, so it is given the word first."""
        self._log("step_ended", role=role, exit=describe_exit(returncode))
        deadline = time.monotonic() + DRIVER_EXPLAINS_S
        while time.monotonic() < deadline and self._inbox.first is None:
            if (driver := self._steps["driver"].poll()) is not None and self._attempt.outcome.exists():
                return self._ending_of_driver(driver)
            time.sleep(POLL_S)
        return self._agents_account(role) or Ending(
            Cause.NODE_FAILURE,
            f"the {role} step ended with {describe_exit(returncode)}; see {self._attempt.log(f'step-{role}')}",
            role,
        )

    def _agents_account(self, role: Role) -> Ending | None:
        """What an agent of that role wrote of its own end, for a driver that was not up yet."""
        for path in sorted(self._attempt.path.glob("events-agent-*.jsonl")):
            for row in read_jsonl(path):
                if row["event"] in ("raylet_died", "raylet_failed") and row["role"] == role:
                    return Ending(Cause.NODE_FAILURE, row["detail"], role, row["node"])
        return None

    def _ending_of_signal(self, number: signal.Signals) -> Ending:
        marker = self._attempt.cancel_marker
        cancelled_by = read_json(marker).get("user") if marker.exists() else None
        deadline = time.monotonic() + SLURM_EXPLAINS_S
        while True:
            ending = self._launcher.ending_of(number, cancelled_by) or cause_of_signal(
                number, cancelled_by, self._queue()
            )
            if ending.cause is not Cause.UNKNOWN or time.monotonic() > deadline:
                return ending
            time.sleep(POLL_S)

    def _second_guess(self, seen: Ending) -> Ending:
        """What looks like a crash from inside may be a component that Slurm ended: scancel 12+1, its own time limit."""
        if seen.cause not in (Cause.CRASHED, Cause.NODE_FAILURE):
            return seen
        return cause_of_component(self._queue()) or seen

    def _queue(self) -> list[QueueRow]:
        try:
            return self._launcher.queue()
        except ClusterError as error:
            self._log("slurm_not_asked", error=str(error))
            return []  # then the cause stays unknown, which is said

    def _write_secrets(self) -> None:
        self._attempt.secrets.mkdir(mode=0o700, exist_ok=True)
        keys = {"api_key": secrets.token_hex(32), "admin_api_key": secrets.token_hex(32)}
        write_json(self._attempt.engine_keys, keys, mode=0o600)
        for path in (self._attempt.ray_token, self._attempt.control_token):
            write_text_atomic(path, secrets.token_hex(32), mode=0o600)

    def _write_ended(self, ending: Ending) -> None:
        finished = ending.cause is Cause.FINISHED
        row = {
            "attempt": self._plan.attempt,
            **asdict(ending),
            "round": last_round_of(self._run_dir, self._plan.attempt),
            "started": self._started,
            "ended": time.time(),
            "exit_code": 0 if finished else RunFailed.exit_code,
        }
        write_json(self._attempt.ended, row)
        self._log("ended", cause=ending.cause, detail=ending.detail)
