"""The batch script: golden, and valid for bash and shellcheck."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_hpc.errors import UserError
from slime_hpc.plan import JobPlan, plan_job
from slime_hpc.render import render_script, supervisor_command, write_environment
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.load import load_profile

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "sbatch"
SHAPES = {
    "quickstart": (),
    "two-by-two": (
        "trainer.nodes=2",
        "trainer.gpus_per_node=4",
        "trainer.megatron={tensor_model_parallel_size: 2}",
        "rollout.nodes=2",
        "rollout.gpus_per_node=4",
    ),
    "tensor-parallel-over-nodes": (
        "trainer.nodes=2",
        "trainer.megatron={tensor_model_parallel_size: 2}",
        "rollout.nodes=2",
    ),
    "component-settings": (
        "qos=normal",
        "environment={modules: [gcc/13, cuda/12.8], setup: ['export PATH=/projects/you/venv/bin:$PATH'], "
        "variables: {HF_HUB_OFFLINE: '1'}}",
        "trainer={partition: train, account: you-train, qos: high, constraint: a100, gres: 'gpu:a100:4', "
        "gpus_per_node: 4, cpus_per_task: 8, mem: 200G, time_limit: 1-00:00:00, "
        "sbatch: {exclusive: true, exclude: 'n[7-9]'}}",
        "rollout={partition: rollout, account: you-rollout, nodes: 2, gpus_per_node: 2, cpus_per_task: 4, mem: 100G, "
        "time_limit: 12:00:00, sbatch: {exclude: n7, mail-type: END}}",
    ),
}
"""Golden scripts: the quickstart, with these keys set."""
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
ACCEPT = "SLIME_HPC_ACCEPT=1 .venv/bin/python -m pytest tests/unit/test_render.py"


def plan_of(quickstart: Path, *sets: str) -> JobPlan:
    profile = load_profile(quickstart, sets=["run_dir=/scratch/you/runs/quickstart", *sets])
    profile_dir = Path("/home/you/quickstart")
    return plan_job(profile.spec, profile.cluster, token="slime-0123456789ab", profile_dir=profile_dir, python="python")


def script_of(plan: JobPlan) -> str:
    return render_script(plan, supervisor_command(plan))


def check_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    found = subprocess.run([SHELLCHECK, script], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_every_script_is_of_a_shape() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == SHAPES.keys()


@pytest.mark.parametrize("shape", SHAPES)
def test_golden(quickstart: Path, shape: str) -> None:
    golden = GOLDEN / f"{shape}.sbatch"
    script = script_of(plan_of(quickstart, *SHAPES[shape]))
    if os.environ.get("SLIME_HPC_ACCEPT"):
        golden.write_text(script)
    difference = "".join(
        difflib.unified_diff(
            golden.read_text().splitlines(keepends=True), script.splitlines(keepends=True), "sbatch/", "rendered now"
        )
    )
    assert not difference, f"\n{difference}\nIf this is meant, accept it with\n  {ACCEPT}"
    check_shell(golden)


def test_only_the_last_line_differs_by_who_submits(quickstart: Path) -> None:
    plan = plan_of(quickstart)
    by_hand, by_submitit = script_of(plan), render_script(plan, "exec env A=b python -m x")
    assert by_hand.splitlines()[:-1] == by_submitit.splitlines()[:-1]
    assert by_hand.endswith("\nexec python -m slime_hpc.supervisor /scratch/you/runs/quickstart\n")
    assert by_submitit.endswith("\nexec env A=b python -m x\n")


def test_awkward_values_stay_one_word(quickstart: Path, tmp_path: Path) -> None:
    plan = plan_of(quickstart, "run_dir='/scratch/it''s $HOME (a)/x'", "environment.variables={A: \"$(id) 'x'\"}")
    script = tmp_path / "run.sbatch"
    script.write_text(script_of(plan))
    subprocess.run(["bash", "-n", script], check=True)
    last = script.read_text().splitlines()[-1].removeprefix("exec python -m slime_hpc.supervisor ")
    said = subprocess.run(["bash", "-c", f"printf %s {last}"], capture_output=True, text=True, check=True).stdout
    assert said == str(plan.run_dir)


def test_without_the_supervisor_it_says_why_and_exits(quickstart: Path, tmp_path: Path) -> None:
    plan = plan_of(quickstart, "environment.variables={MARK: set}", f"run_dir={tmp_path}/run")
    plan = plan.model_copy(update={"python": "false"})
    environment = RunDir(plan.run_dir).attempt(1).environment
    environment.parent.mkdir(parents=True)
    write_environment(plan, environment)
    script = tmp_path / "run.sbatch"
    script.write_text(render_script(plan, "exec echo started $MARK"))
    done = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot import slime_hpc" in done.stderr
    script.write_text(render_script(plan.model_copy(update={"python": "true"}), "exec echo started $MARK"))
    assert subprocess.run(["bash", script], check=False, capture_output=True, text=True).stdout == "started set\n"
    environment.unlink()
    done = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and str(environment) in done.stderr


def test_an_option_that_would_leak_is_refused(quickstart: Path) -> None:
    with pytest.raises(UserError, match="--priority"):
        script_of(plan_of(quickstart, "trainer.sbatch={priority: 3}"))
