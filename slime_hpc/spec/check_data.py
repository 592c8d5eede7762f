"""Checks of data, evaluation and reward: what the driver would find after the wait in the queue."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_hpc.errors import Finding, UserError
from slime_hpc.spec.explain import did_you_mean
from slime_hpc.spec.run import RM_TYPES, Data, EvalSet, RunSpec, Source
from slime_hpc.spec.sources import GYM_KEYS, has_reasoning_gym, read_prompts, source_name

Findings = Iterator[Finding]

CHECKED_ROWS = 100_000
"""Of a file: about a second. The driver reads the rest."""


def check_data(spec: RunSpec) -> Findings:
    """Can the prompts be read, and do their options mean something?"""
    yield from _check_keys("data", spec.data)
    if spec.data.tool_key is not None and not spec.data.apply_chat_template:
        yield Finding("data.tool_key", "has no effect without a chat template; set data.apply_chat_template: true")
    yield from _check_source("data", spec.data, spec.reward.rm_type)


def check_eval(spec: RunSpec) -> Findings:
    names = [eval_set.name for eval_set in spec.eval.sets]
    if spec.eval.interval is not None and not names:
        yield Finding("eval.interval", "has no effect without eval.sets; name one, or leave the interval out")
    for index, eval_set in enumerate(spec.eval.sets):
        path = f"eval.sets.{index}"
        if eval_set.name in names[:index]:
            yield Finding(f"{path}.name", f"{eval_set.name!r} is the name of another set too; choose another")
        if eval_set.n_samples_per_eval_prompt > 1 and eval_set.eval_temperature == 0:
            yield Finding(
                f"{path}.n_samples_per_eval_prompt",
                f"{eval_set.n_samples_per_eval_prompt} samples at temperature 0 are all the same; set it to 1,"
                " or eval_temperature above 0",
            )
        yield from _check_seed(path, eval_set, spec.data)
        yield from _check_keys(path, eval_set)
        yield from _check_source(path, eval_set.as_data(spec.data), spec.reward.rm_type)


def _check_seed(path: str, eval_set: EvalSet, training: Data) -> Findings:
    """Seeds 1 and 2 make nearly the same reasoning-gym tasks: each is made from seed + its index."""
    ours, theirs = eval_set.reasoning_gym, training.reasoning_gym
    if not eval_set.held_out or ours is None or theirs is None:
        return
    same_kind = (ours.dataset, ours.params) == (theirs.dataset, theirs.params)
    if same_kind and ours.seed < theirs.seed + theirs.size and theirs.seed < ours.seed + ours.size:
        yield Finding(
            f"{path}.reasoning_gym.seed",
            f"with {ours.seed} some tasks are those of the training data, since task i is made from seed + i;"
            f" use {theirs.seed + theirs.size} or more",
        )


def _check_keys(path: str, source: Source) -> Findings:
    """A reasoning-gym row has fixed keys: any that the profile names would be ignored."""
    if source.reasoning_gym is not None:
        for name in source.model_fields_set & GYM_KEYS.keys():
            yield Finding(f"{path}.{name}", "has no effect with reasoning_gym, whose keys are fixed; remove it")


def _check_source(path: str, data: Data, rm_type: str | None) -> Findings:
    if data.reasoning_gym is not None:
        key, count = f"{path}.reasoning_gym", 1
        if not has_reasoning_gym():
            return  # a login node may lack it; the driver needs it, and says so
    else:
        key, count = f"{path}.prompt_data", CHECKED_ROWS
    if data.prompt_data is not None and ".parquet" in data.prompt_data.name and not importlib.util.find_spec("pyarrow"):
        return  # as above
    if data.label_key is None and data.reasoning_gym is None:
        rm_type = None  # said once, of the reward
    try:
        read = sum(1 for _ in itertools.islice(read_prompts(data, rm_type), count))
    except UserError as error:
        yield Finding(key, str(error))
    else:
        if not read:
            yield Finding(key, f"{source_name(data)} holds no prompt")


def check_reward(spec: RunSpec, profile_dir: Path) -> Findings:
    if spec.reward.custom_rm_path is not None:
        yield from _check_custom_reward(spec.reward.custom_rm_path, profile_dir)
    else:
        yield from _check_rm_type(spec)


def _check_rm_type(spec: RunSpec) -> Findings:
    """Is it one of ours, and do all prompts carry what it compares with?"""
    key, rm_type = "reward.rm_type", spec.reward.rm_type
    if rm_type not in RM_TYPES:
        hint = did_you_mean(rm_type or "", RM_TYPES)
        yield Finding(key, f"{rm_type!r} is not a verifier of this version{hint}; or write one as custom_rm_path")
        return
    for path, data in _sources(spec):
        if data.reasoning_gym is None and rm_type == "reasoning_gym":
            yield Finding(key, f"'reasoning_gym' needs tasks of that package, but {path} reads {source_name(data)}")
        if data.reasoning_gym is None and data.label_key is None and rm_type == "math":
            yield Finding(key, f"'math' compares with the label, but {path}.label_key does not say where that stands")


def _sources(spec: RunSpec) -> Iterator[tuple[str, Data]]:
    yield "data", spec.data
    for index, eval_set in enumerate(spec.eval.sets):
        yield f"eval.sets.{index}", eval_set.as_data(spec.data)


def _check_custom_reward(dotted: str, profile_dir: Path) -> Findings:
    """Can the function be found? Without importing it: it may need what a login node has not."""
    key = "reward.custom_rm_path"
    module, _, function = dotted.rpartition(".")
    if not all(part.isidentifier() for part in dotted.split(".")) or not module:
        yield Finding(key, f"{dotted!r} is not of the form module.function, such as reward.grade")
        return
    file = _module_file(module, profile_dir)
    if file is None:
        if not _is_installed(module.split(".")[0]):
            yield Finding(key, f"no module {module!r}: neither {profile_dir}/{module}.py nor one that is installed")
        return
    try:
        names = set(_top_level_names(ast.parse(file.read_bytes()).body))
    except (SyntaxError, ValueError) as e:
        yield Finding(key, f"{file} is not valid Python: {e}")
        return
    if function not in names and "*" not in names:
        yield Finding(key, f"{file} defines no {function!r}{did_you_mean(function, names)}")


def _module_file(module: str, profile_dir: Path) -> Path | None:
    base = profile_dir.joinpath(*module.split("."))
    return next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # __main__, which is no module to import from
        return False


def _top_level_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What a module defines, in whatever branch; ``*`` where it takes another's names."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign():
                yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
            case _:
                for branch in ("body", "orelse", "finalbody", "handlers"):
                    yield from _top_level_names(getattr(node, branch, []))
