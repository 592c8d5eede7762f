"""One SGLang server as a child process of the actor that holds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from slime_hpc.device import get_device
from slime_hpc.errors import ClusterError, DeadlineExceeded, UserError
from slime_hpc.plan import JobPlan
from slime_hpc.records import write_json
from slime_hpc.rollout.client import EngineClient, EngineError, EngineKeys
from slime_hpc.run_dir import RunDir
from slime_hpc.supervisor.address import interface_of

UNPROTECTED = frozenset({"api_key", "admin_api_key", "grpc_port", "tokenizer_worker_num"})
"""Arguments that would show the keys, or open a listener that does not ask for them."""
LOG_TAIL_LINES = 15
LOG_LINE_CHARACTERS = 200
POLL_S = 0.5


def engine_args(plan: JobPlan, index: int, *, host: str, port: int) -> dict[str, object]:
    """ServerArgs fields of engine ``index``. UserError if the profile sets one that is ours to set."""
    spec = plan.spec
    owned: dict[str, object] = {
        "model_path": str(spec.model.hf_checkpoint),
        "served_model_name": spec.name,
        "host": host,
        "port": port,
        "tp_size": spec.rollout.gpus_per_engine,
        "base_gpu_id": index % plan.engines_per_node * spec.rollout.gpus_per_engine,
        "random_seed": spec.seed + index,
        "skip_server_warmup": True,  # it would be refused: SGLang does not know the keys
        "log_level": "info",
        "log_level_http": "warning",
        # The router knows no such parameter, and would drop it from a request.
        "preferred_sampling_params": json.dumps({"spaces_between_special_tokens": False}),
    }
    clash = sorted((owned.keys() | UNPROTECTED) & spec.rollout.sglang.keys())
    if clash:
        raise UserError(f"rollout.sglang: {', '.join(clash)} cannot be set in a profile: slime-hpc sets it; remove it")
    return {**get_device(plan.cluster.device).sglang_args(), **spec.rollout.sglang, **owned}


def prompt_room(args: Mapping[str, object], context: int, response: int) -> int:
    """Tokens of the longest prompt that an engine of these arguments completes with ``response`` tokens.

    ``context`` is the model's. Source: SGLang 0.5.23, ``validate_input_length`` and ``Scheduler.max_req_len``.
    """
    limits = (args.get("context_length"), args.get("max_total_tokens"))
    room = min(context, *(n for n in limits if isinstance(n, int)))
    return min(room - 2 - response, room - 7)


def engine_env(inherited: Mapping[str, str], device_env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: what there is, with the device's own on top and its PYTHONPATH in front."""
    paths = [env["PYTHONPATH"] for env in (device_env, inherited) if env.get("PYTHONPATH")]
    merged = {**inherited, **device_env}
    return merged | {"PYTHONPATH": os.pathsep.join(paths)} if paths else merged


class EngineServer:
    """Engine ``index`` of the plan, listening on ``host`` only, logging to ``attempts/N/logs/engine-K.log``.

    Call it from a process's main thread: the kernel ends the server when the thread that started
    it ends. The server stays in this process's group and inherits its environment, by which the
    sweep finds it.
    """

    def __init__(self, plan: JobPlan, index: int, host: str) -> None:
        self._plan = plan
        self._index = index
        self._host = host
        self._attempt = RunDir(plan.run_dir).attempt(plan.attempt)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """Where it listens; set by ``start``."""

    @property
    def log(self) -> Path:
        return self._attempt.log(f"engine-{self._index}")

    @property
    def pid(self) -> int:
        """Of the main process; killing it ends the schedulers too."""
        return self._started.pid

    def start(self) -> str:
        """Start the process and return its URL; ``wait_healthy`` says when it serves."""
        port = _free_port(self._host)
        args_file = self._attempt.engine_args(self._index)
        write_json(args_file, engine_args(self._plan, self._index, host=self._host, port=port))
        launcher = [sys.executable, "-m", "slime_hpc.rollout.launch_sglang"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*launcher, str(args_file), str(self._attempt.engine_keys), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_env(os.environ, self._device_env()),
            )
        self.url = f"http://{self._host}:{port}"
        return self.url

    def wait_healthy(self, deadline_s: float) -> None:
        """Return once it has generated a token. ClusterError if it exits first, with the end of its log."""
        asyncio.run(self._wait_healthy(deadline_s))

    def poll(self) -> int | None:
        """The main process's exit status (-9 if killed by SIGKILL), None while it runs."""
        return self._started.poll()

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL the main process and its children. DeadlineExceeded if one is still there after that.

        Never SIGTERM: inside a job it is blocked, and SGLang then takes its children's end for a crash.
        """
        family = _family(self._started.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it went with its parent
                process.kill()
        self._started.wait(timeout_s)
        deadline = time.monotonic() + timeout_s
        while alive := [p for p in family if _is_alive(p)]:
            if time.monotonic() > deadline:
                left = ", ".join(str(p.pid) for p in alive)
                raise DeadlineExceeded(f"{self}: killed, but processes {left} are still there after {timeout_s:g} s")
            time.sleep(0.05)

    def __str__(self) -> str:
        return f"engine {self._index} on {self._host}"

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self} has not been started")
        return self._process

    def _device_env(self) -> dict[str, str]:
        device = get_device(self._plan.cluster.device)
        return {**device.sglang_env(), **device.network_env(interface_of(self._host))}

    async def _wait_healthy(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        async with EngineClient(self.url, EngineKeys.load(self._attempt.engine_keys)) as client:
            while True:
                if (status := self.poll()) is not None:
                    raise ClusterError(f"{self} ended with exit status {status} while starting\n{log_tail(self.log)}")
                try:
                    return await client.health()
                except EngineError as error:
                    if time.monotonic() > deadline:
                        raise DeadlineExceeded(
                            f"{self} was not healthy after {deadline_s:.0f} s: {error}\n{log_tail(self.log)}"
                        ) from error
                    await asyncio.sleep(POLL_S)  # no listener yet, or loading: what waiting is for


def log_tail(log: Path) -> str:
    """For an error message: the last lines of a child's log, and where it is."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"the end of {log}:", *(line[:LOG_LINE_CHARACTERS] for line in lines)])


def _free_port(host: str) -> int:
    """A port free at this moment; should another process take it first, the server ends and its log says so."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; none if it has ended."""
    try:
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []  # it has ended and its children, who would have died with it, are not to be found


def _is_alive(process: psutil.Process) -> bool:
    """False for a zombie: as init of a container PID 1 may never reap one."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
