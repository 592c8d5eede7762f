"""A profile file and its overrides → a checked RunSpec. Reads files, writes none; imports no engine.

Every problem is reported at once, each with file and line, dotted path, value, rule and next step.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_hpc.errors import Finding, ProfileError
from slime_hpc.run_dir import absolute_path
from slime_hpc.spec.check import check_profile, is_utf8
from slime_hpc.spec.cluster import ClusterProfile
from slime_hpc.spec.explain import did_you_mean, show, validate
from slime_hpc.spec.passthrough import apply_flags, check_keys, check_values, set_over
from slime_hpc.spec.run import RunSpec
from slime_hpc.spec.secrets import masked_setting
from slime_hpc.spec.template import find_placeholders
from slime_hpc.spec.yaml_tree import KeyPath, Tree, escape_json, parse_value, parse_yaml

PATH_KEYS: tuple[KeyPath, ...] = (("run_dir",), ("model", "hf_checkpoint"), ("data", "prompt_data"))
"""Relative ones are taken from the profile's directory; ``~`` and ``$VARIABLES`` are expanded."""


@dataclass(frozen=True)
class Profile:
    """A profile that passed every check, and where it came from."""

    path: Path
    text: str
    spec: RunSpec
    cluster: ClusterProfile
    tree: Tree

    @property
    def directory(self) -> Path:
        return self.path.parent

    def require_none(self, findings: Iterable[Finding]) -> None:
        """ProfileError with the file and line of each finding, if there is any."""
        located = [_at(finding, self.tree) for finding in findings]
        if located:
            raise ProfileError(_in_order(located))


def load_profile(path: Path, *, sets: Sequence[str] = (), flags: Sequence[str] = ()) -> Profile:
    """Read, override, validate and cross-check; ProfileError holds everything found.

    ``sets`` are ``a.b=c`` texts, ``flags`` trailing ``--sglang-…`` and Megatron options with their values.
    """
    path = absolute_path(path)
    return _resolve(path, _read_text(path), _short(path), sets, flags)


def reload_profile(spec: RunSpec, directory: Path, *, sets: Sequence[str] = (), flags: Sequence[str] = ()) -> Profile:
    """A run's resolved spec once more, with changes, checked like a profile in ``directory``."""
    json = spec.model_dump_json(indent=2, exclude_defaults=True)  # checks tell what is set from what is not
    return _resolve(directory / "profile.yaml", escape_json(json), "the run's spec", sets, flags, resolved=True)


def _resolve(
    path: Path, text: str, origin: str, sets: Sequence[str], flags: Sequence[str], *, resolved: bool = False
) -> Profile:
    tree = parse_yaml(text, origin)
    done = {tree.get(key) for key in _path_keys(tree)} if resolved else set()
    apply_sets(tree, sets)
    apply_flags(tree, flags)
    _require_filled_in(tree)
    findings = _resolve_paths(tree, path.parent, done) + check_keys(tree)
    spec, more = validate(RunSpec, tree)
    findings += more
    cluster, more = _find_cluster(tree, path.parent)
    findings += more
    if spec is not None and cluster is not None:
        more = [*check_profile(spec, cluster, path.parent), *check_values(spec, cluster)]
        findings += [_at(finding, tree) for finding in more]
    if findings or spec is None or cluster is None:
        raise ProfileError(_in_order(findings))
    return Profile(path, text, spec, cluster, tree)


def _require_filled_in(tree: Tree) -> None:
    """ProfileError with what is left open, and what is wrong elsewhere as far as that can be told by then."""
    left = find_placeholders(tree)
    if left:
        _, findings = validate(RunSpec, tree)
        paths = {finding.path for finding in left}
        raise ProfileError(_in_order([*left, *(finding for finding in findings if finding.path not in paths)]))


def _find_cluster(tree: Tree, base: Path) -> tuple[ClusterProfile | None, list[Finding]]:
    name = tree.get(("cluster",))
    if not isinstance(name, str):
        return None, []  # missing or of a wrong type: the schema says so
    try:
        return load_cluster(name, base), []
    except ProfileError as e:
        return None, [_at(finding, tree) for finding in e.findings]


def is_cluster_file(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def load_cluster(name: str, base: Path) -> ClusterProfile:
    """A shipped cluster profile by name, or any by path (one with a slash, or ending in .yaml)."""
    if is_cluster_file(name):
        path = base / _expand(name)
    else:
        path = shipped_cluster_profiles() / f"{name}.yaml"
        known = [p.stem for p in path.parent.glob("*.yaml")]
        if name not in known:
            raise ProfileError([Finding("cluster", f"no cluster profile is named {name!r}{did_you_mean(name, known)}")])
    tree = parse_yaml(_read_text(path), _short(path))
    cluster, findings = validate(ClusterProfile, tree)
    if findings or cluster is None:
        raise ProfileError(findings)
    return cluster


def shipped_cluster_profiles() -> Path:
    """Inside the package of a wheel; beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "cluster_profiles"
    return inside if inside.is_dir() else package.parent / "cluster_profiles"


def apply_sets(tree: Tree, sets: Sequence[str]) -> None:
    """``rollout.nodes=8`` over what the file says; values follow the file's scalar rules, lists and all."""
    for text in sets:
        origin = f"--set {masked_setting(text)}"
        dotted, equals, value = text.partition("=")
        if not equals or not all(dotted.split(".")):
            raise ProfileError([Finding("", "is not of the form key.subkey=value", origin)])
        set_over(tree, tuple(dotted.split(".")), parse_value(value, origin), origin)


def _path_keys(tree: Tree) -> list[KeyPath]:
    """``PATH_KEYS``, and the file of each evaluation set."""
    sets = tree.get(("eval", "sets"))
    count = len(sets) if isinstance(sets, list) else 0
    return [*PATH_KEYS, *(("eval", "sets", str(i), "prompt_data") for i in range(count))]


def _resolve_paths(tree: Tree, base: Path, done: set[str]) -> list[Finding]:
    findings = []
    for key in _path_keys(tree):
        text = tree.get(key)
        if not isinstance(text, str) or text in done:
            continue  # missing or of a wrong type: the schema says so. Or resolved once, and a $ in it is a $
        full = os.path.join(base, _expand(text))
        reason = _why_unusable(text, full)
        if reason:
            findings.append(Finding(".".join(key), f"{show(text)}: {reason}; write the path out", tree.where(key)))
        else:
            tree.set(key, str(absolute_path(full)), tree.where(key))
    return findings


def _why_unusable(text: str, full: str) -> str:
    """Of a path; nothing if it can be used. A ``$`` or ``~`` that came out of a variable is a name's."""
    variables = re.finditer(r"\$(?:(\w+)|\{([^}]*)\}?)", text)
    unset = next((found[0] for found in variables if (found[1] or found[2]) not in os.environ), None)
    if unset is None and text.startswith("~") and _expand(text).startswith("~"):
        unset = "~"
    if unset is not None:
        return f"{unset} is not known here"
    if not text:
        return "is empty"
    return "" if is_utf8(full) else f"{full!r} is not UTF-8"


def _expand(text: str) -> str:
    return os.path.expandvars(os.path.expanduser(text))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        reason = "does not exist"
    except IsADirectoryError:
        reason = f"is a directory; name a file in it, such as {path / 'profile.yaml'}"
    except UnicodeDecodeError:
        reason = "is not a text file"
    except OSError as e:
        reason = f"cannot be read: {e.strerror}"
    raise ProfileError([Finding("", reason, _short(path))])


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it: easier to read, and to click on."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return str(path)  # somebody has removed the directory this shell is in
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _at(finding: Finding, tree: Tree) -> Finding:
    path = tuple(finding.path.split(".")) if finding.path else ()
    return finding if finding.where else dataclasses.replace(finding, where=tree.where(path))


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    """As they stand in the file."""

    def line(finding: Finding) -> tuple[str, int]:
        file, _, number = finding.where.rpartition(":")
        return (file, int(number)) if number.isdigit() else (finding.where, 0)

    return sorted(findings, key=line)
