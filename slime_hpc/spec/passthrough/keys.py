"""The keys under ``rollout.sglang``, ``rollout.router`` and ``trainer.megatron``: known? of the right type?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime_hpc.errors import Finding
from slime_hpc.spec.cluster import ClusterProfile
from slime_hpc.spec.explain import did_you_mean, show
from slime_hpc.spec.passthrough import megatron, router, sglang
from slime_hpc.spec.passthrough.arguments import (
    Argument,
    Interval,
    Spelling,
    key_spellings,
    load_snapshot,
    value_of,
)
from slime_hpc.spec.run import RunSpec
from slime_hpc.spec.yaml_tree import KeyPath, Tree

_OBJECT = "it takes a Python object, which a profile cannot hold"


@dataclass(frozen=True)
class Engine:
    """One of the programs whose arguments are passed through."""

    title: str
    package: str
    path: KeyPath
    """Where its keys stand in a profile."""
    prefix: str
    """What its flags begin with on our command line."""
    arguments: Callable[[], Mapping[str, Argument]]
    refusal: Callable[[str], str | None]
    """Why no value of an argument is accepted, or None."""
    intervals: Mapping[str, Interval]


SGLANG = Engine(
    "SGLang",
    "sglang",
    ("rollout", "sglang"),
    "--sglang-",
    sglang.sglang_arguments,
    sglang.sglang_refusal,
    sglang.INTERVALS,
)
ROUTER = Engine(
    "sglang-router",
    "sglang-router",
    ("rollout", "router"),
    "--router-",
    router.router_arguments,
    router.router_refusal,
    router.INTERVALS,
)
MEGATRON = Engine(
    "Megatron",
    "megatron-core",
    ("trainer", "megatron"),
    "--",
    megatron.megatron_arguments,
    megatron.megatron_refusal,
    megatron.INTERVALS,
)
ENGINES = (SGLANG, ROUTER, MEGATRON)


def set_over(tree: Tree, path: KeyPath, value: object, origin: str) -> None:
    """``Tree.set`` that also takes the place of an argument's other spellings, which the file may use."""
    for engine in ENGINES:
        there = tree.get(engine.path)
        if path[:-1] == engine.path and isinstance(there, dict):
            names = {key: meant.name for key, meant in key_spellings(engine.arguments().values()).items()}
            for key in [k for k in there if names.get(k, k) == names.get(path[-1], path[-1])]:
                del there[key]
    tree.set(path, value, origin)


def check_keys(tree: Tree) -> list[Finding]:
    """Findings on every key; afterwards the tree has the good ones only, under their arguments' own names."""
    return [finding for engine in ENGINES for finding in _check_engine(engine, tree)]


def _check_engine(engine: Engine, tree: Tree) -> Iterator[Finding]:
    written = tree.get(engine.path)
    if not isinstance(written, dict):
        return  # left out, or of a wrong type: the schema says so
    spellings = key_spellings(engine.arguments().values())
    good: dict[str, Any] = {}
    for key, value in written.items():
        spelling = spellings.get(key)
        problem = _unknown(engine, key) if spelling is None else _problem(engine, spelling, value, good)
        path = (*engine.path, key)
        if problem or spelling is None:
            yield Finding(".".join(path), problem, tree.where(path))
        else:
            good[spelling.name] = value_of(spelling, value)
            tree.origins.setdefault((*engine.path, spelling.name), tree.where(path))
    written.clear()
    written.update(good)


def _problem(engine: Engine, spelling: Spelling, value: Any, good: Mapping[str, Any]) -> str:
    """Why a known key is not accepted with this value beside the ``good`` ones, or nothing."""
    argument = engine.arguments()[spelling.name]
    reason = engine.refusal(argument.name) or (None if set(argument.types) - {"null"} else _OBJECT)
    if reason:
        return f"may not be set here: {reason}"
    value = value_of(spelling, value)
    interval = engine.intervals.get(argument.name)
    if mismatch := argument.mismatch(value):
        return mismatch
    if interval is not None and value is not None and value not in interval:
        return f"{show(value)} is not {interval}"
    if argument.name in good:
        return f"is another name of {argument.name}, which is given as well; remove one"
    return ""


def _unknown(engine: Engine, key: str) -> str:
    version = load_snapshot(engine.package).version
    return f"not an argument of {engine.title} ({engine.package} {version}){did_you_mean(key, engine.arguments())}"


def check_values(spec: RunSpec, cluster: ClusterProfile) -> Iterator[Finding]:
    """What shows only beside the rest of the profile: the device, the model, and keys that own the same matter."""
    for key in spec.rollout.sglang if cluster.device == "cpu" else ():
        if reason := sglang.cpu_refusal(key):
            yield Finding(f"rollout.sglang.{key}", f"may not be set here: {reason}")
    arguments = spec.trainer.megatron
    for key, value in arguments.items():
        if decided := megatron.DECIDED.get(key):
            yield from _check_decided(key, value, decided, spec)
    for key, reason in megatron.megatron_conflicts(arguments):
        yield Finding(f"trainer.megatron.{key}", reason)


def _check_decided(key: str, value: Any, decided: megatron.Decided, spec: RunSpec) -> Iterator[Finding]:
    path = f"trainer.megatron.{key}"
    try:
        wanted = decided.value(spec, _config_json(spec))
    except KeyError as missing:
        yield Finding(path, f"cannot be compared: config.json of model.hf_checkpoint has no {missing}; remove this key")
        return
    except (TypeError, ZeroDivisionError) as error:
        yield Finding(path, f"cannot be compared: config.json of model.hf_checkpoint makes no sense: {error}")
        return
    if value != wanted:
        yield Finding(path, f"{show(value)} disagrees: {decided.by} ({show(wanted)}); remove this key, or change that")


def _config_json(spec: RunSpec) -> dict[str, Any]:
    """Empty if there is none to read: the check of model.hf_checkpoint, or the trainer, says so."""
    try:
        config = json.loads((spec.model.hf_checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def snapshot_warnings(spec: RunSpec) -> list[str]:
    """Where the engines that are installed here are not those that the keys were checked against."""
    if spec.environment.setup:
        return []  # the job has a Python of its own, about which this one knows nothing
    used = {"sglang": spec.rollout.sglang, "sglang-router": spec.rollout.router, "megatron-core": spec.trainer.megatron}
    return [stale for package, keys in used.items() if keys and (stale := load_snapshot(package).stale())]
