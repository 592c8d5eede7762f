"""YAML with our own scalar rules, and the line of every key.

PyYAML's rules are YAML 1.1's: ``4:00:00`` becomes 14400, ``no`` becomes false, ``0123`` becomes 83 and ``1e-6``
stays text. Here a time, ``no`` and ``0123`` stay text, ``1e-6`` is a number, and a key given twice is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from slime_hpc.errors import Finding, ProfileError

KeyPath = tuple[str, ...]

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
MAX_VALUES = 10_000
MAX_DEPTH = 20
"""Far more than any profile has."""
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


def parse_scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means."""
    if text in ("", "~", "null"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


@dataclass
class Tree:
    """The plain values of one YAML file, and where each key stands."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """``file:line`` of the key, or of its nearest parent."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.file)

    def get(self, path: KeyPath) -> Any:
        """The value there, or None."""
        return self._walk(path, default=None)

    def __contains__(self, path: KeyPath) -> bool:
        absent = object()
        return self._walk(path, default=absent) is not absent

    def _walk(self, path: KeyPath, default: object) -> Any:
        value: Any = self.values
        for key in path:
            items = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else value
            if not isinstance(items, dict) or key not in items:
                return default
            value = items[key]
        return value

    def set(self, path: KeyPath, value: object, origin: str) -> None:
        """Put a value over what the file says; ProfileError where a parent is no mapping, nor a list of that length."""
        *parents, last = path
        parent: Any = self.values
        for depth, key in enumerate(parents, start=1):
            parent = parent.setdefault(key, {}) if isinstance(parent, dict) else parent[int(key)]
            if not isinstance(parent, dict) and not _is_index(parent, path[depth]):
                raise ProfileError([Finding(".".join(path[:depth]), "has no keys below it to set", origin)])
        parent[int(last) if isinstance(parent, list) else last] = value
        self.origins[path] = origin


def _is_index(value: object, key: str) -> bool:
    return isinstance(value, list) and key.isdecimal() and int(key) < len(value)


def parse_yaml(text: str, file: str) -> Tree:
    """One mapping; ProfileError with every problem found."""
    tree = Tree(file)
    reader = _Reader(tree)
    node = _compose(text, file)
    if node is None:
        raise ProfileError([Finding("", "is empty; `slime-hpc init` writes one to start from", file)])
    if not isinstance(node, yaml.MappingNode):
        raise ProfileError([Finding("", "is not a mapping; write `key: value` lines", _at(file, node.start_mark))])
    tree.values = reader.read(node, ())
    if reader.findings:
        raise ProfileError(reader.findings)
    return tree


def parse_value(text: str, origin: str) -> Any:
    """The value of an option such as ``--set a.b=[1, x]``."""
    reader = _Reader(Tree(origin))
    node = _compose(text, origin)
    value = None if node is None else reader.read(node, ())
    if reader.findings:
        raise ProfileError(reader.findings)
    return value


def escape_json(text: str) -> str:
    """JSON that YAML reads as the same values: it refuses some characters as they are, and folds rare line breaks."""
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as e:
        hint = "; indent with spaces, not tabs" if "'\\t'" in (e.problem or "") else ""
        problem = " ".join(filter(None, (e.context, e.problem)))
        raise ProfileError([Finding("", f"not YAML: {problem}{hint}", _at(file, e.problem_mark))]) from e
    except yaml.YAMLError as e:
        raise ProfileError([Finding("", f"not text that YAML allows: {str(e).splitlines()[0]}", file)]) from e
    except RecursionError:
        raise ProfileError([Finding("", "nested too deeply to be a profile", file)]) from None


def _at(file: str, mark: Any) -> str:
    return file if mark is None else f"{file}:{mark.line + 1}"


class _Reader:
    """Nodes to plain values, noting the line of each path."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.findings: list[Finding] = []
        self._open: list[yaml.Node] = []
        self._values = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """The node's value. ProfileError at once where there is too much of it: aliases of aliases multiply."""
        self._values += 1
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            rule = (
                f"more than {MAX_VALUES} values, aliases counted"
                if len(path) <= MAX_DEPTH
                else f"over {MAX_DEPTH} levels"
            )
            here = ".".join(path[:3])
            raise ProfileError(
                [Finding(here, f"holds {rule}: no profile needs that", _at(self.tree.file, node.start_mark))]
            )
        self.tree.origins.setdefault(path, _at(self.tree.file, node.start_mark) if path else self.tree.file)
        if node.tag not in _TAGS:
            return self._refuse(node, path, f"the tag {node.tag} is not allowed; write the plain value")
        if any(node is parent for parent in self._open):
            return self._refuse(node, path, "contains itself through an anchor")
        self._open.append(node)
        try:
            return self._read(node, path)
        finally:
            self._open.pop()

    def _read(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, str(i))) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._text(node, path) if node.style else parse_scalar(node.value)

    def _text(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        """Quoted text. Escapes in it may write what no file name, variable or JSON can hold."""
        try:
            text = node.value.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON writes one character as two
        except UnicodeDecodeError:
            return self._refuse(node, path, "holds half of a surrogate pair, which is no character; write it whole")
        if "\0" in text:
            return self._refuse(node, path, "holds a NUL character; leave it out")
        return text

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, path, "a key must be a word, not a list or mapping")
                continue
            here = (*path, key.value)
            if key.value in values:
                self._refuse(key, here, f"given twice, first at {self.tree.where(here)}; remove one")
                continue
            self.tree.origins[here] = _at(self.tree.file, key.start_mark)
            values[key.value] = self.read(value, here)
        return values

    def _refuse(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.findings.append(Finding(".".join(path), message, _at(self.tree.file, node.start_mark)))
