"""Children in place of job steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime_hpc.plan import JobPlan, one_host_plan
from slime_hpc.render import in_environment
from slime_hpc.slurm.steps import Step
from slime_hpc.spec.check_one_host import check_one_host
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.supervisor.address import LOOPBACK, ONE_HOST, own_address
from slime_hpc.supervisor.cause import Cause
from slime_hpc.supervisor.launch import LocalLauncher
from slime_hpc.types import Role


@pytest.fixture
def plan(profile: Profile) -> JobPlan:
    return one_host_plan(profile, 2)


def step(path: Path, *command: str, overlap: bool = False) -> Step:
    return Step("trainer", 0, ["here"], 1, command, path, overlap)


def test_the_plan_takes_no_more_cpus_than_there_are(profile: Profile) -> None:
    assert [c.cpus_per_task for c in one_host_plan(profile, 2).components] == [2, 2]
    assert [c.cpus_per_task for c in one_host_plan(profile, 99).components] == [8, 8]


def test_several_nodes_and_gpus_are_refused(quickstart: Path) -> None:
    profile = load_profile(quickstart, sets=["trainer.nodes=2", "rollout.nodes=2"])
    found = list(check_one_host(profile.spec, profile.cluster.model_copy(update={"device": "cuda"})))
    assert [finding.path for finding in found] == ["trainer.nodes", "rollout.nodes", "cluster"]
    assert found[0].message == ("is 2, but `slime-hpc run` has this host only; set it to 1, or use `slime-hpc submit`")
    assert not list(check_one_host(load_profile(quickstart).spec, profile.cluster))


def test_a_step_is_a_child_out_of_the_terminals_reach(plan: JobPlan, tmp_path: Path) -> None:
    output = tmp_path / "log"
    code = f"import os; print(os.getsid(0) == os.getpid(), os.environ[{ONE_HOST!r}])"
    assert LocalLauncher(plan).start_step(step(output, sys.executable, "-c", code)).wait(timeout=30) == 0
    assert output.read_text() == "True 1\n"


def test_one_agent_has_all_roles_on_the_one_host(plan: JobPlan) -> None:
    launcher = LocalLauncher(plan)
    assert launcher.agents == ((Role.TRAINER, Role.ROLLOUT),)
    assert launcher.allocation.job_text is None
    assert len({component.nodes for component in launcher.allocation.components}) == 1


def test_signals_are_told_from_each_other(plan: JobPlan) -> None:
    launcher = LocalLauncher(plan)
    for number, by, detail in (
        (signal.SIGINT, None, "ended by Ctrl-C"),
        (signal.SIGHUP, None, "ended by SIGHUP"),
        (signal.SIGTERM, "ada", "cancelled with `slime-hpc cancel` by ada"),
    ):
        ending = launcher.ending_of(number, by)
        assert ending is not None and (ending.cause, ending.detail) == (Cause.CANCELLED, detail)


def test_setup_lines_come_before_a_command(plan: JobPlan) -> None:
    command = ["sh", "-c", 'echo "$A" "$1"', "sh", "two  words"]
    assert in_environment(plan, command) == command
    prepared = in_environment(plan.model_copy(update={"setup": ("export A='it is'",)}), command)
    assert subprocess.run(prepared, capture_output=True, text=True, check=True).stdout == "it is two  words\n"
    noisy = in_environment(plan.model_copy(update={"setup": ("echo Loading python/3.11",)}), ["echo", "{}"])
    done = subprocess.run(noisy, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "Loading python/3.11\n")


def test_own_address_is_loopback_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_HOST, "1")
    assert own_address("no-such-node.invalid") == LOOPBACK


def test_the_driver_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    """An agent does not: it sees by itself that its parent is gone, and has its node to clear."""
    code = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from slime_hpc.slurm.steps import Step
from slime_hpc.supervisor.launch import LocalLauncher
launcher = LocalLauncher(SimpleNamespace(components=(1, 2), setup=(), variables={{}}))
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
steps = [Step("x", 0, ["n"], 1, sleep, Path({str(tmp_path / "log")!r}), overlap) for overlap in (True, False)]
print(*(launcher.start_step(step).pid for step in steps), flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as supervisor:
        assert supervisor.stdout is not None
        driver, agent = map(int, supervisor.stdout.readline().split())
        time.sleep(0.5)  # for both to be past exec
        supervisor.kill()
    try:
        deadline = time.monotonic() + 10
        while psutil.pid_exists(driver) and psutil.Process(driver).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the driver outlives its supervisor"
            time.sleep(0.05)
        assert psutil.pid_exists(agent)
    finally:
        os.kill(agent, signal.SIGKILL)
