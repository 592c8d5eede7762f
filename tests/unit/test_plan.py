"""RunSpec → JobPlan."""

from __future__ import annotations

from pathlib import Path

from slime_hpc.plan import JobPlan, plan_job, plan_warnings
from slime_hpc.spec.load import Profile, load_profile


def plan_of(quickstart: Path, *sets: str) -> JobPlan:
    profile = load_profile(quickstart, sets=sets)
    return plan_job(profile.spec, profile.cluster, token="t", profile_dir=profile.directory, python="/venv/bin/python")


def test_each_component_carries_every_option(quickstart: Path) -> None:
    plan = plan_of(
        quickstart,
        "trainer.time_limit=1:00:00",
        "trainer.constraint=a100",
        "trainer.mem=64G",
        "rollout.mem=32000M",
        "rollout.account=other",
        "rollout.cpus_per_task=2",
        "rollout.sbatch={exclude: n7, mail_type: END}",
    )
    assert plan.trainer.options == {
        "partition": "train",
        "account": "dev",
        "constraint": "a100",
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": 8,
        "gres": "gpu:1",
        "mem": "65536M",
        "time": "01:00:00",
    }
    assert plan.rollout.options == {
        "partition": "rollout",
        "account": "other",
        "nodes": 1,
        "ntasks-per-node": 1,
        "cpus-per-task": 2,
        "gres": "gpu:1",
        "mem": "32000M",
        "time": "00:30:00",
        "exclude": "n7",
        "mail-type": "END",
    }


def test_gres_as_written_and_no_gpus(quickstart: Path) -> None:
    plan = plan_of(quickstart, "trainer.gres=gpu:a100:1", "rollout.gpus_per_node=0")
    assert plan.trainer.options["gres"] == "gpu:a100:1"
    assert "gres" not in plan.rollout.options
    assert plan.engines == 1


def test_setup_lines_in_order_and_quoted(quickstart: Path) -> None:
    plan = plan_of(
        quickstart,
        "environment.modules=[cuda/12.8]",
        "environment.setup=[source /venv/bin/activate]",
        "environment.variables={A: x y}",
    )
    assert plan.setup == ("module load cuda/12.8", "source /venv/bin/activate")
    assert plan.variables == {"A": "x y"}


def test_engine_python_is_what_setup_puts_on_path(quickstart: Path) -> None:
    assert plan_of(quickstart).engine_python == "/venv/bin/python"
    plan = plan_of(quickstart, "environment.setup=[source /venv/bin/activate]")
    assert (plan.python, plan.engine_python) == ("/venv/bin/python", "python")


def test_json_round_trip(profile: Profile) -> None:
    plan = plan_job(profile.spec, profile.cluster, token="t", profile_dir=profile.directory, python="python")
    assert JobPlan.model_validate_json(plan.model_dump_json()) == plan
    assert '"time_limit":"00:30:00"' in plan.model_dump_json()


def test_cost_and_warnings(quickstart: Path) -> None:
    plan = plan_of(quickstart, "rollout.time_limit=60", "checkpoint.interval=10")
    assert plan.max_gpu_hours == 0.5 + 1.0
    assert plan_warnings(plan) == ["the run ends when its shortest component does, after 00:30:00"]
    assert any(
        "checkpoint.interval" in warning for warning in plan_warnings(plan_of(quickstart, "checkpoint.interval=null"))
    )
