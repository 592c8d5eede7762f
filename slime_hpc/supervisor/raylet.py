"""One node's raylet: its command line, its environment, its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime_hpc.processes import kill_with_parent
from slime_hpc.supervisor.address import free_ports
from slime_hpc.supervisor.sweep import TAG

OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Rounds pass through it as lists of token ids: megabytes."""

LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As on those systems, Ray then takes 127.0.0.1 for its address, and its servers listen there only."""

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for each other spin otherwise, and where others want their cores a copy of 500 MB takes seconds."""

_SLURMS = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|PMI|PMIX|SUBMITIT)_?")


@dataclass(frozen=True)
class RayletConfig:
    """What one node brings to the Ray of an attempt."""

    host: str
    """This node's own address."""
    head: str | None
    """``host:port`` of the head; None on the head itself."""
    gcs_port: int
    """Where the head listens."""
    cpus: int
    resources: Mapping[str, int]
    """Roles and how many processes of each this node takes: ``{"trainer": 4}``."""
    temp_dir: Path
    token_file: Path
    tag: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The profile's, which go before what is only a good default."""


def raylet_argv(config: RayletConfig) -> list[str]:
    """``ray start --block`` with private ports, no dashboard, and roles as resources."""
    ports = (
        "node-manager-port",
        "object-manager-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    )
    head = ["--head", f"--port={config.gcs_port}", "--include-dashboard=false"]
    if importlib.util.find_spec("grpc") is not None:
        # With grpc there is a client server, on a fixed port if given none: two runs on a node would collide.
        head.append(f"--ray-client-server-port={free_ports(config.host, 1)[0]}")
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(head if config.head is None else [f"--address={config.head}"]),
        f"--node-ip-address={config.host}",
        *(f"--{name}={port}" for name, port in zip(ports, free_ports(config.host, len(ports)), strict=True)),
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--num-cpus={config.cpus}",
        "--num-gpus=0",  # placement goes by role; actors choose their GPUs themselves
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(dict(config.resources))}",
        f"--temp-dir={config.temp_dir / 'r'}",  # not temp_dir itself, of which Ray would open the mode to everybody
        "--include-log-monitor=false",  # a process that sends logs to the driver, which has no use for them
        *("--disable-usage-stats", "--log-style=record", "--log-color=false"),
    ]


def raylet_env(environ: Mapping[str, str], config: RayletConfig) -> dict[str, str]:
    """What the raylet, and with it every worker, inherits: Slurm's variables not, or a worker's srun goes astray."""
    kept = {name: value for name, value in environ.items() if not _SLURMS.match(name)}
    return {
        **kept,
        TAG: config.tag,
        **ray_auth_env(config.token_file),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray kills workers when the whole host runs short of memory, whoever uses it: memory is Slurm's to police.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # Ray's own 15 would let everything else on the node go before trainer and engine
        "OMP_NUM_THREADS": str(_threads_per_process(config)),
        **WAITING,
        "TOKENIZERS_PARALLELISM": "false",
        # Not the login node's, which may be too long for a socket or not be here; SGLang leaves files in it.
        "TMPDIR": str(config.temp_dir),
        "TRITON_CACHE_DIR": str(config.temp_dir / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(config.temp_dir / "inductor"),
        **config.variables,
    }


def _threads_per_process(config: RayletConfig) -> int:
    """Slurm may have been told of more CPUs than there are, as a devcluster's is: more threads only get in the way."""
    cpus = min(config.cpus, len(os.sched_getaffinity(0)))
    return max(1, cpus // max(1, sum(config.resources.values())))


def ray_auth_env(token_file: Path) -> dict[str, str]:
    """Ray's processes listen on every interface, so the token is all that keeps others out. Read at import of ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        # Ray's 30 s are too short for cold imports from a shared file system.
        "RAY_raylet_start_wait_time_s": "120",
    }


def start_raylet(config: RayletConfig, log: Path) -> subprocess.Popen[bytes]:
    """Start it as a child that the kernel ends when this process ends."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            raylet_argv(config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=raylet_env(os.environ, config),
            preexec_fn=kill_with_parent,  # noqa: PLW1509 - made for it
        )
