"""What a schema cannot see: numbers that must fit together, files that must exist, limits of this version.

Each ``check_`` returns findings, with the path of the key to change; the loader adds file and line.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from slime_hpc.errors import Finding
from slime_hpc.spec.check_data import check_data, check_eval, check_reward
from slime_hpc.spec.cluster import MAX_SCRATCH_BYTES, ClusterProfile
from slime_hpc.spec.explain import did_you_mean, show
from slime_hpc.spec.passthrough import SBATCH_OWNED
from slime_hpc.spec.run import Component, Environment, RunSpec

Findings = Iterator[Finding]

MAX_NAME_BYTES = 255
"""Of one name in a path, on Linux's file systems."""
MAX_RUN_DIR_BYTES = 3840
"""A path may have 4095, of which the longest below a run directory takes less than 256."""
MAX_VARIABLE_BYTES = 128 * 1024
"""``NAME=value`` and its end. Source: execve(2), MAX_ARG_STRLEN."""

_SLURMS = re.compile(r"SLURM|SUBMITIT|PMI|(SBATCH|SRUN|SALLOC)_")
_OURS = re.compile(r"SLIME_HPC_.*|RAY_AUTH_.*|RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER|GLOO_SOCKET_IFNAME")
"""GLOO_SOCKET_IFNAME: the interface of the address that the nodes were told of."""
_SHELLS = {
    "_", "BASHOPTS", "BASHPID", "BASH_ARGV0", "BASH_COMMAND", "BASH_SUBSHELL", "BASH_VERSINFO", "COMP_WORDBREAKS",
    "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "OLDPWD", "PPID",
    "PWD", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID",
}  # fmt: skip
"""Bash refuses them, or they have another value when they are read. Source: bash(1), Shell Variables."""


def check_profile(spec: RunSpec, cluster: ClusterProfile, profile_dir: Path) -> list[Finding]:
    """Everything beyond the schema that is wrong with a run."""
    return [
        *check_cluster(cluster),
        *check_shape(spec, cluster),
        *check_component("trainer", spec.trainer, cluster),
        *check_component("rollout", spec.rollout, cluster),
        *check_leaks(spec),
        *check_algorithm(spec),
        *check_run_dir(spec.run_dir),
        *check_profile_dir(profile_dir),
        *check_model_dir(spec.model.hf_checkpoint),
        *check_data(spec),
        *check_eval(spec),
        *check_reward(spec, profile_dir),
        *check_environment(spec.environment),
    ]


def check_cluster(cluster: ClusterProfile) -> Findings:
    if cluster.device == "cuda":
        yield Finding(
            "cluster",
            f"{cluster.name!r} has `device: cuda`, which this version has not run on yet; "
            "use a cluster profile with `device: cpu`, such as devcluster",
        )
    size = len(cluster.scratch.encode())
    if size > MAX_SCRATCH_BYTES:
        yield Finding(
            "cluster",
            f"its scratch {cluster.scratch!r} has {size} bytes, but Ray's sockets need a path of at most "
            f"{MAX_SCRATCH_BYTES}; use a shorter one, such as /tmp",
        )
    if not cluster.scratch.startswith("/"):
        yield Finding("cluster", f"its scratch {cluster.scratch!r} is not an absolute path")


def gpus_per_node(component: Component, cluster: ClusterProfile) -> int | None:
    """What the profile says, else the partition's own number, else unknown."""
    if component.gpus_per_node is not None:
        return component.gpus_per_node
    return cluster.partition(component.partition).gpus_per_node


def cpus_per_task(component: Component, cluster: ClusterProfile) -> int | None:
    """What the profile says, else all that a node has, else unknown."""
    return component.cpus_per_task or cluster.partition(component.partition).cpus_per_node


def check_shape(spec: RunSpec, cluster: ClusterProfile) -> Findings:
    """Do nodes, GPUs, engines and tensor parallelism divide, and does this version run engines that large?"""
    yield from _check_ranks(spec, cluster)
    yield from _check_engines(spec, cluster)


def _check_ranks(spec: RunSpec, cluster: ClusterProfile) -> Findings:
    gpus = gpus_per_node(spec.trainer, cluster)
    if gpus is None:
        yield _unknown("trainer", "gpus_per_node", "GPUs", spec.trainer, cluster)
        return
    ranks = spec.trainer.nodes * max(1, gpus)
    shape = f"{_count(spec.trainer.nodes, 'node')} × {_count(max(1, gpus), 'rank')} a node = {_count(ranks, 'rank')}"
    tensor = spec.trainer.megatron.get("tensor_model_parallel_size") or 1
    if ranks % tensor:
        yield Finding(
            "trainer.megatron.tensor_model_parallel_size",
            f"{tensor} does not divide the trainer's {ranks} ({shape}); set it to a divisor of {ranks}",
        )


def _check_engines(spec: RunSpec, cluster: ClusterProfile) -> Findings:
    gpus = gpus_per_node(spec.rollout, cluster)
    if gpus is None:
        yield _unknown("rollout", "gpus_per_node", "GPUs", spec.rollout, cluster)
        return
    gpus = max(1, gpus)
    per_engine = spec.rollout.gpus_per_engine
    if gpus % per_engine:
        yield Finding(
            "rollout.gpus_per_engine",
            f"{per_engine} does not divide gpus_per_node ({gpus}); set one to a multiple of the other",
        )
    elif per_engine > 1:
        yield Finding(
            "rollout.gpus_per_engine",
            f"{per_engine} GPUs an engine, but this version has run engines of one only; set it to 1, "
            "and have more engines instead",
        )


def _unknown(role: str, key: str, what: str, component: Component, cluster: ClusterProfile) -> Finding:
    """Of a size that nobody gave, most likely because the partition is misspelt."""
    name = component.partition
    if cluster.partitions and name not in cluster.partitions:
        hint = did_you_mean(name, cluster.partitions)
        return Finding(
            f"{role}.partition",
            f"{name!r} is not in cluster profile {cluster.name!r}{hint} (if it is right, set {role}.{key} yourself)",
        )
    return Finding(
        f"{role}.{key}",
        f"is missing, and the cluster profile does not say how many {what} a node of {component.partition!r} has",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_component(role: str, component: Component, cluster: ClusterProfile) -> Findings:
    """Is it within what the cluster profile says a partition has, and are its sbatch options its own?"""
    limits = cluster.partition(component.partition)
    if cpus_per_task(component, cluster) is None:
        yield _unknown(role, "cpus_per_task", "CPUs", component, cluster)
    for key, asked, limit, what in (
        ("nodes", component.nodes, limits.max_nodes, "nodes a job may have"),
        ("gpus_per_node", component.gpus_per_node, limits.gpus_per_node, "GPUs a node has"),
        ("cpus_per_task", component.cpus_per_task, limits.cpus_per_node, "CPUs a node has"),
        ("mem", component.mem_mb, limits.mem_per_node_mb, "MB a node has"),
    ):
        if asked is not None and limit is not None and asked > limit:
            yield Finding(f"{role}.{key}", f"{asked} is over the {limit} {what} in partition {component.partition!r}")
    for option, value in component.sbatch.items():
        yield from _check_sbatch_option(f"{role}.sbatch.{option}", option, value)


def _check_sbatch_option(path: str, option: str, value: str | int | bool) -> Findings:
    name = sbatch_name(option)
    if name in SBATCH_OWNED:
        yield Finding(path, f"may not be set here: {SBATCH_OWNED[name]}")
    elif not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        yield Finding(path, f"{option!r} is not the long name of an sbatch option, such as exclude")
    elif isinstance(value, str) and not value.isprintable():
        yield Finding(path, f"{show(value)} has a line break or control character, which sbatch cannot read")


def sbatch_name(option: str) -> str:
    """``ntasks_per_node`` as sbatch writes it."""
    return option.replace("_", "-")


def check_leaks(spec: RunSpec) -> Findings:
    """sbatch carries some options of one component over to the next that leaves them out, and cannot undo these."""
    for key, trainer, rollout in (
        ("account", spec.trainer.account, spec.rollout.account or spec.account),
        ("qos", spec.trainer.qos, spec.rollout.qos or spec.qos),
        ("mem", spec.trainer.mem_mb, spec.rollout.mem_mb),
    ):
        if trainer is not None and rollout is None:
            yield Finding(f"rollout.{key}", f"is missing: sbatch would carry trainer.{key} ({trainer}) over; set both")


def check_algorithm(spec: RunSpec) -> Findings:
    low, high = spec.algorithm.eps_clip, spec.algorithm.eps_clip_high
    if not 0 < low < 1:
        yield Finding("algorithm.eps_clip", f"{low} is not between 0 and 1: the ratio is clipped at 1 - eps_clip")
    if high is not None and high < low:
        yield Finding("algorithm.eps_clip_high", f"{high} is below eps_clip ({low}); leave it out to use the same")
    yield from _check_learning_rate(spec)
    if spec.sampling.n_samples_per_prompt < 2:
        yield Finding(
            "sampling.n_samples_per_prompt",
            "is 1, but GRPO compares the samples of one prompt: every advantage would be 0; use 2 or more",
        )


def _check_learning_rate(spec: RunSpec) -> Findings:
    algorithm = spec.algorithm
    decay_iters = algorithm.lr_decay_iters or spec.num_rollout
    if algorithm.min_lr > algorithm.lr:
        yield Finding("algorithm.min_lr", f"{algorithm.min_lr:g} is above lr ({algorithm.lr:g}); set it to less")
    if algorithm.lr_decay_style == "constant":
        for key in ("min_lr", "lr_decay_iters"):
            if key in algorithm.model_fields_set:
                yield Finding(
                    f"algorithm.{key}",
                    "has no effect on a constant rate; leave it out, or set lr_decay_style to linear or cosine",
                )
    if algorithm.lr_warmup_iters >= decay_iters:
        yield Finding(
            "algorithm.lr_warmup_iters",
            f"{algorithm.lr_warmup_iters} rounds of warm-up do not end before round {decay_iters}, where the schedule "
            "does (lr_decay_iters, or else num_rollout); set it to fewer",
        )


def check_run_dir(run_dir: Path) -> Findings:
    text, longest = str(run_dir), max(run_dir.parts, key=_size, default="")
    if bad := next((c for c in text if c in "%\\" or not c.isprintable()), None):
        yield Finding(
            "run_dir",
            f"{show(text)} has {show(bad)}, which Slurm's output option cannot take; choose another name",
        )
    if _size(longest) > MAX_NAME_BYTES:
        yield Finding(
            "run_dir",
            f"{show(longest)} has {_size(longest)} bytes, a name in a path at most {MAX_NAME_BYTES}; shorten it",
        )
    elif _size(text) > MAX_RUN_DIR_BYTES:
        yield Finding(
            "run_dir",
            f"{show(text)} has {_size(text)} bytes, but may have at most {MAX_RUN_DIR_BYTES}, with room for what lies "
            "below it; choose a shorter path",
        )


def check_profile_dir(profile_dir: Path) -> Findings:
    if not is_utf8(str(profile_dir)):
        yield Finding("", f"lies in {str(profile_dir)!r}, which is not UTF-8 and cannot be recorded; move it elsewhere")


def is_utf8(path: str) -> bool:
    """Whether a path is text; one that Linux allows may be any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def _size(name: str) -> int:
    return len(os.fsencode(name))


def check_model_dir(path: Path) -> Findings:
    """Files only: what they hold is the engines' matter."""
    key = "model.hf_checkpoint"
    if not path.exists():
        quoted = shlex.quote(str(path))
        download, tiny = f"hf download NAME --local-dir {quoted}", f"python -m slime_hpc.testing.tiny_model {quoted}"
        hint = f"it is a path: download a model there ({download}), or make a tiny random one ({tiny})"
        yield Finding(key, f"{path} does not exist; {hint}")
        return
    if not path.is_dir():
        yield Finding(key, f"{path} is not a directory; name the one that holds config.json")
        return
    for name in ("config.json", "*.safetensors", "tokenizer.json"):
        if not any(path.glob(name)):
            yield Finding(key, f"{path} has no {name}; copy it from where the model came from")


def check_environment(environment: Environment) -> Findings:
    for name, value in environment.variables.items():
        if problem := _problem_of_variable(name, value):
            yield Finding(f"environment.variables.{name}", problem)
    for i, module in enumerate(environment.modules):
        if not re.fullmatch(r"\S+", module):
            yield Finding(f"environment.modules.{i}", f"{module!r} is not a module name: it is empty or has spaces")


def _problem_of_variable(name: str, value: str) -> str:
    """Why a variable could not reach every process as it stands, or nothing. Never its value: that may be a secret."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"{name!r} is not a name the shell can export: it takes letters, digits and _, no digit first; rename it"
    if _SLURMS.match(name):
        return "is Slurm's own, which tells a job's processes about themselves by such; leave it out, or see sbatch"
    if _OURS.fullmatch(name):
        return "is set by slime-hpc, afresh for each attempt; leave it out"
    if name in _SHELLS:
        return "is the shell's own, which sets it itself; leave it out"
    size = _size(name) + _size(value) + 2
    if size > MAX_VARIABLE_BYTES:
        return f"takes {size} bytes, but Linux gives a process at most {MAX_VARIABLE_BYTES} in one; put it into a file"
    return ""
