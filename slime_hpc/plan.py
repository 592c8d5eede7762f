"""RunSpec → JobPlan: the concrete resources of one job. Pure; runs on a laptop without Slurm."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from slime_hpc import __version__
from slime_hpc.errors import UserError
from slime_hpc.spec.check import cpus_per_task, gpus_per_node, sbatch_name
from slime_hpc.spec.cluster import ClusterProfile
from slime_hpc.spec.load import Profile
from slime_hpc.spec.passthrough import snapshot_warnings
from slime_hpc.spec.run import Component, Environment, RunSpec, SbatchOptions
from slime_hpc.spec.secrets import masked, written_secrets
from slime_hpc.spec.values import Strict, format_time
from slime_hpc.types import Role

SCHEMA_VERSION: Final = 1
TOKEN_PREFIX: Final = "slime-"


class ComponentPlan(Strict):
    """One component of the het job. ``options`` are all its sbatch options, by long name."""

    index: int
    role: Role
    partition: str
    nodes: int
    gpus_per_node: int
    cpus_per_task: int
    time_limit_s: int
    options: SbatchOptions

    @property
    def processes_per_node(self) -> int:
        """Trainer ranks on one node, or GPUs engines can use: one a GPU, one where there are none."""
        return max(1, self.gpus_per_node)


class JobPlan(Strict):
    """What ``plan.json`` holds: everything the allocation needs to know."""

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: str
    token: str
    """Unique to this submission: its Slurm comment, and the tag in the environment of its processes."""
    attempt: int
    run_dir: Path
    profile_dir: Path
    """Where the profile lay; hooks beside it are importable."""
    python: str
    """Interpreter of the supervisor: the one `submit` ran on."""
    engine_python: str
    """Interpreter of agents, driver, trainer and engines, as found inside the job."""
    setup: tuple[str, ...]
    """Shell lines before the supervisor starts, cluster's and profile's; the profile's variables come after them."""
    components: tuple[ComponentPlan, ...]
    spec: RunSpec
    cluster: ClusterProfile

    @property
    def trainer(self) -> ComponentPlan:
        return self.component(Role.TRAINER)

    @property
    def rollout(self) -> ComponentPlan:
        return self.component(Role.ROLLOUT)

    @property
    def trainer_ranks(self) -> int:
        return self.trainer.nodes * self.trainer.processes_per_node

    @property
    def engines_per_node(self) -> int:
        return self.rollout.processes_per_node // self.spec.rollout.gpus_per_engine

    @property
    def engines(self) -> int:
        return self.rollout.nodes * self.engines_per_node

    def component(self, role: Role) -> ComponentPlan:
        return next(c for c in self.components if c.role is role)

    @property
    def variables(self) -> dict[str, str]:
        """The profile's environment variables."""
        return self.spec.environment.variables

    @property
    def gpus(self) -> int:
        """GPUs of all nodes of the job."""
        return sum(c.nodes * c.gpus_per_node for c in self.components)

    @property
    def max_gpu_hours(self) -> float:
        """What the job costs if it runs to its time limit."""
        return sum(c.nodes * c.gpus_per_node * c.time_limit_s for c in self.components) / 3600


def is_anothers(comment: str, tokens: Collection[str]) -> bool:
    """Whether a job with this comment is another run's: a cluster that is set up afresh counts from 1 again."""
    return comment.startswith(TOKEN_PREFIX) and comment not in tokens


def read_plan(path: Path) -> JobPlan:
    """``plan.json``. UserError where it is damaged, or another version's."""
    try:
        return JobPlan.model_validate_json(path.read_bytes())
    except ValidationError as e:
        reason = e.errors()[0]["msg"]
        raise UserError(f"{path} is damaged, or was written by another version of slime-hpc: {reason}") from e
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from e


def new_plan(profile: Profile, attempt: int = 1) -> JobPlan:
    """A profile's job, under a fresh token, for the Python that runs now."""
    return plan_job(
        profile.spec,
        profile.cluster,
        token=f"{TOKEN_PREFIX}{secrets.token_hex(6)}",
        profile_dir=profile.directory,
        python=sys.executable,
        attempt=attempt,
    )


def one_host_plan(profile: Profile, cpus: int) -> JobPlan:
    """The same on this host alone, of whose ``cpus`` no component can have more."""
    plan = new_plan(profile)
    components = (c.model_copy(update={"cpus_per_task": min(c.cpus_per_task, cpus)}) for c in plan.components)
    return plan.model_copy(update={"components": tuple(components)})


def plan_job(
    spec: RunSpec, cluster: ClusterProfile, *, token: str, profile_dir: Path, python: str, attempt: int = 1
) -> JobPlan:
    """The job of a checked spec (``load_profile`` did the checking). ``python`` is what the supervisor runs on."""
    return JobPlan(
        tool_version=__version__,
        token=token,
        attempt=attempt,
        run_dir=spec.run_dir,
        profile_dir=profile_dir,
        python=python,
        engine_python="python" if spec.environment.setup else python,
        setup=(*cluster.setup, *_setup_lines(spec.environment)),
        components=(
            _plan_component(0, Role.TRAINER, spec.trainer, spec, cluster),
            _plan_component(1, Role.ROLLOUT, spec.rollout, spec, cluster),
        ),
        spec=spec,
        cluster=cluster,
    )


def _setup_lines(environment: Environment) -> tuple[str, ...]:
    return (
        *(f"module load {shlex.quote(module)}" for module in environment.modules),
        *environment.setup,
    )


def _plan_component(index: int, role: Role, asked: Component, spec: RunSpec, cluster: ClusterProfile) -> ComponentPlan:
    gpus = gpus_per_node(asked, cluster)
    cpus = cpus_per_task(asked, cluster)
    assert gpus is not None and cpus is not None, "check_shape refuses a component of unknown size"
    time_limit_s = asked.time_limit_s or spec.time_limit_s
    options: dict[str, str | int | bool | None] = {
        "partition": asked.partition,
        "account": asked.account or spec.account,
        "qos": asked.qos or spec.qos,
        "constraint": asked.constraint,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gres": asked.gres or (f"gpu:{gpus}" if gpus else None),
        "mem": None if asked.mem_mb is None else f"{asked.mem_mb}M",
        "time": format_time(time_limit_s),
        **{sbatch_name(option): value for option, value in asked.sbatch.items()},
    }
    return ComponentPlan(
        index=index,
        role=role,
        partition=asked.partition,
        nodes=asked.nodes,
        gpus_per_node=gpus,
        cpus_per_task=cpus,
        time_limit_s=time_limit_s,
        options={option: value for option, value in options.items() if value is not None},
    )


def shown_plan(plan: JobPlan) -> dict[str, Any]:
    """The plan as JSON for showing: secrets among the profile's variables masked."""
    found: dict[str, Any] = plan.model_dump(mode="json")
    found["spec"]["environment"]["variables"] = masked(plan.variables)
    return found


def plan_warnings(plan: JobPlan) -> list[str]:
    """What is allowed and may still surprise."""
    warnings = snapshot_warnings(plan.spec)
    limits = {component.time_limit_s for component in plan.components}
    if len(limits) > 1:
        warnings.append(f"the run ends when its shortest component does, after {format_time(min(limits))}")
    warnings += (
        f"environment.setup sets {name} to a value that stands in the batch script, which Slurm keeps; move it to "
        "environment.variables"
        for name in written_secrets(plan.spec.environment.setup)
    )
    if plan.spec.checkpoint.interval is None:
        warnings.append("checkpoint.interval is not set: only the last round is saved, a job that ends early loses all")
    return warnings
