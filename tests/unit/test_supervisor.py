from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.slurm.steps import Step
from slime_hpc.supervisor.cause import Cause, cause_of_signal, describe_exit
from slime_hpc.supervisor.control import ControlServer, send
from slime_hpc.supervisor.raylet import RayletConfig, raylet_argv, raylet_env
from slime_hpc.supervisor.signals import SignalInbox
from slime_hpc.supervisor.sweep import TAG, end_tagged, tag
from slime_hpc.types import JobId, JobState

TOKEN = "secret"


def row(component: int, state: str, reason: str = "None") -> QueueRow:
    return QueueRow(JobId(12, component), 12 + component, JobState(state), reason, "n1", None, None, 0, "")


@pytest.mark.parametrize(
    ("cancelled_by", "queue", "cause"),
    [
        ("ada", [row(0, "COMPLETING"), row(1, "CANCELLED")], Cause.CANCELLED),
        (None, [row(0, "COMPLETING"), row(1, "CANCELLED")], Cause.CANCELLED),
        (None, [row(0, "COMPLETING", "TimeLimit"), row(1, "CANCELLED")], Cause.TIME_LIMIT),
        (None, [row(0, "COMPLETING"), row(1, "PENDING")], Cause.UNKNOWN),
        (None, [], Cause.UNKNOWN),
    ],
)
def test_cause_of_a_signal(cancelled_by: str | None, queue: list[QueueRow], cause: Cause) -> None:
    assert cause_of_signal(signal.SIGTERM, cancelled_by, queue).cause is cause


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (-9, "signal 9 (SIGKILL)"),
        (137, "signal 9 (SIGKILL)"),
        (143, "signal 15 (SIGTERM)"),
        (3, "exit code 3"),
        (0, "exit code 0"),
        (255, "exit code 255"),
    ],
)
def test_describe_exit(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text


def test_control_answers_whoever_has_the_token() -> None:
    heard: list[dict[str, object]] = []
    server = ControlServer("127.0.0.1", TOKEN, heard.append)
    try:
        assert send(server.address, TOKEN, {"type": "stop"}) == {"ok": True}
        with pytest.raises(ClusterError, match="hung up"):
            send(server.address, "wrong", {"type": "stop"})
    finally:
        server.close()
    assert heard == [{"type": "stop"}]


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"[]\n", b"7\n", b'{"token": 7}\n', b"\xff\xfe\n", b"\n"])
def test_control_survives_strangers(line: bytes) -> None:
    server = ControlServer("127.0.0.1", TOKEN, lambda message: {"echo": message})
    try:
        with socket.create_connection(server.address, timeout=5) as stranger:
            stranger.sendall(line)
            assert stranger.recv(100) == b""
        assert send(server.address, TOKEN, {"type": "x"}) == {"echo": {"type": "x"}}
    finally:
        server.close()


def test_control_names_who_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = ("127.0.0.1", deaf.getsockname()[1])
        with pytest.raises(ClusterError, match=rf"127.0.0.1:{address[1]} did not answer: timed out"):
            send(address, TOKEN, {"type": "stop"}, timeout_s=0.2)


def sleeper(value: str | None) -> subprocess.Popen[bytes]:
    """A process that ignores SIGTERM in a session of its own, with that tag."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environ = os.environ | ({TAG: value} if value else {})
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_sweep_ends_the_tagged_of_one_node_only() -> None:
    ours, other_node, untagged = sleeper(tag("t1", 1, "n1")), sleeper(tag("t1", 1, "n11")), sleeper(None)
    try:
        assert end_tagged(tag("t1", 1, "n1"), timeout_s=5) == []
        assert not psutil.pid_exists(ours.pid)
        assert other_node.poll() is None and untagged.poll() is None
        assert end_tagged("t1.", timeout_s=5) == []
        assert not psutil.pid_exists(other_node.pid)
        assert untagged.poll() is None
    finally:
        for process in (ours, other_node, untagged):
            process.kill()
            process.wait()


ORPHAN = """
import os, setproctitle, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        setproctitle.setproctitle("ray::X" + "x" * 2000)
        print(os.getpid(), flush=True)
        time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_descent_finds_an_orphan_that_hides_its_environment() -> None:
    """As Ray's processes do: in a session of their own, the title in place of arguments and environment."""
    code = (
        "import subprocess, sys\n"
        "from slime_hpc.supervisor.sweep import adopt_orphans, end_descendants\n"
        "adopt_orphans()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], stdout=subprocess.PIPE)\n"
        "print(int(child.stdout.readline()), end_descendants(timeout_s=5))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=30)
    orphan, left = done.stdout.split(maxsplit=1)
    assert left == "[]\n" and not psutil.pid_exists(int(orphan))


def test_sweep_spares_itself_and_its_parents() -> None:
    code = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', "
        "\"from slime_hpc.supervisor.sweep import end_tagged; print(end_tagged('t2.', timeout_s=1))\"]).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {TAG: tag("t2", 1, "n1")}, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


def test_inbox_keeps_the_first_notice() -> None:
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    }
    try:
        inbox = SignalInbox.install()
        assert inbox.first is None
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert inbox.first is signal.SIGUSR2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raylet_config(head: str | None) -> RayletConfig:
    return RayletConfig(
        host="127.0.0.1",
        head=head,
        gcs_port=7001,
        cpus=8,
        resources={"rollout": 2},
        temp_dir=Path("/tmp/shpc-0123456789ab"),
        token_file=Path("/run/token"),
        tag="t.a1.n3",
    )


def test_raylets_share_a_head_and_no_port() -> None:
    head, worker = raylet_argv(raylet_config(None)), raylet_argv(raylet_config("10.0.0.1:7001"))
    assert {"--head", "--port=7001", "--include-dashboard=false"} <= set(head)
    assert "--address=10.0.0.1:7001" in worker and "--head" not in worker
    ports = [
        option.split("=")[1] for option in worker if option.split("=")[0].endswith("port") and "worker" not in option
    ]
    assert len(ports) == len(set(ports)) == 6
    assert json.loads(next(o for o in worker if o.startswith("--resources=")).partition("=")[2]) == {"rollout": 2}


@pytest.mark.parametrize(("present", "threads"), [(64, "4"), (2, "1"), (6, "3")])
def test_no_more_threads_than_there_are_cpus(monkeypatch: pytest.MonkeyPatch, present: int, threads: str) -> None:
    """The configuration asks for 8 CPUs and two processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(present)))
    assert raylet_env({}, raylet_config(None))["OMP_NUM_THREADS"] == threads


def test_raylet_environment_has_no_slurm_and_no_token() -> None:
    environ = raylet_env(
        {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "PMIX_RANK": "0", "SUBMITIT_EXECUTOR": "slurm", "HOME": "/h"},
        raylet_config(None),
    )
    assert not [name for name in environ if name.startswith(("SLURM", "PMI", "SUBMITIT"))]
    assert environ["HOME"] == "/h" and environ[TAG] == "t.a1.n3"
    assert environ["RAY_AUTH_TOKEN_PATH"] == "/run/token"


def test_a_profiles_variables_go_before_defaults_and_the_shells_tmpdir_is_replaced() -> None:
    config = dataclasses.replace(raylet_config(None), variables={"OMP_NUM_THREADS": "7"})
    environ = raylet_env({"TMPDIR": "/run/user/1000"}, config)
    assert (environ["OMP_NUM_THREADS"], environ["TMPDIR"]) == ("7", "/tmp/shpc-0123456789ab")


def test_step_lets_one_node_die_alone() -> None:
    argv = Step("rollout", 1, ["n3", "n4"], 8, ["agent"], Path("/r/log")).argv()
    assert argv[0] == "srun" and argv[-1] == "agent"
    assert {"--het-group=1", "--nodes=2", "--ntasks=2", "--nodelist=n3,n4", "--kill-on-bad-exit=0", "--wait=0"} <= set(
        argv
    )
    assert not {"--overlap", "--gres=none"} & set(argv)
    driver = Step("driver", 0, ["n1"], 1, ["driver"], Path("/r/log"), overlap=True).argv()
    assert {"--overlap", "--gres=none"} <= set(driver)
