"""The arguments of an installed engine, written down so that a login node without engines can check against them."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from slime_hpc.records import write_text_atomic
from slime_hpc.spec.explain import show
from slime_hpc.spec.values import Strict

_WORDS = {
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a mapping of keys",
    "list[bool]": "a list of true or false",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "list[str]": "a list of texts",
    "list[dict]": "a list of mappings",
}
"""Each type a snapshot may name, as a message says it."""


class Argument(Strict):
    """One argument: what its value may be, and the flags that set it."""

    name: str
    types: tuple[str, ...]
    """Alternatives, each a key of ``_WORDS``. None: it takes a Python object, which no profile can hold."""
    flags: tuple[str, ...] = ()
    """``--flag VALUE``, or a bare ``--flag`` for true."""
    off_flags: tuple[str, ...] = ()
    """A bare ``--no-flag`` for false."""
    choices: tuple[str | int, ...] = ()
    help: str = ""

    @property
    def is_switch(self) -> bool:
        return "bool" in self.types

    @property
    def element(self) -> str | None:
        """Type of a list's elements, if the value is one."""
        return next((kind[5:-1] for kind in self.types if kind.startswith("list[")), None)

    def mismatch(self, value: object) -> str | None:
        """Why a value cannot be passed on, or None."""
        if not any(_fits(value, kind) for kind in self.types):
            wanted = " or ".join(_WORDS[kind] for kind in self.types if kind != "null")
            quote = "; write it in quotes" if "str" in self.types and isinstance(value, int | float) else ""
            return f"{show(value)} is not {wanted}{quote}{self._explained}"
        for item in value if isinstance(value, list) else [value]:
            if self.choices and item is not None and item not in self.choices:
                return f"{show(item)} is not one of {', '.join(map(str, self.choices))}{self._explained}"
        return None

    @property
    def _explained(self) -> str:
        return f" ({self.help.rstrip('.')})" if self.help else ""


def type_names(hint: Any) -> tuple[str, ...]:
    """An annotation as a snapshot writes it: ``list[int] | None`` → ``("list[int]", "null")``."""
    return tuple(dict.fromkeys(name for name in _type_names(hint) if name in _WORDS))


def _type_names(hint: Any) -> Iterator[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for alternative in args:
            yield from _type_names(alternative)
    elif origin is Literal:
        yield from ("null" if value is None else type(value).__name__ for value in args)
    elif origin is list:
        yield from (f"list[{name}]" for name in _type_names(args[0]))
    elif origin is dict or hint is dict:
        yield "dict"
    elif hint is list:
        yield "list[str]"
    elif isinstance(hint, enum.EnumMeta):
        yield "str"
    elif isinstance(hint, type):
        yield "null" if hint is type(None) else hint.__name__


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(_fits(item, kind[5:-1]) for item in value)
    if isinstance(value, bool):
        return kind == "bool"
    wanted = {"null": type(None), "int": int, "float": int | float, "str": str, "dict": dict}.get(kind)
    return wanted is not None and isinstance(value, wanted)


class Snapshot(Strict):
    """What one version of a package accepts."""

    package: str
    """Name of its distribution, such as megatron-core."""
    version: str
    date: str
    """When it was taken: 2026-12-01."""
    arguments: tuple[Argument, ...]

    def named(self) -> dict[str, Argument]:
        return {argument.name: argument for argument in self.arguments}

    def write(self, path: Path) -> None:
        """An argument a line, so that a new version's differences can be read."""
        head = json.dumps(self.model_dump(exclude={"arguments"}))[1:-1]
        rows = ",\n".join(json.dumps(row) for row in self.model_dump(exclude_defaults=True)["arguments"])
        write_text_atomic(path, f'{{{head}, "arguments": [\n{rows}\n]}}\n')

    def stale(self) -> str | None:
        """A warning if another version than the snapshot's is installed here. Imports nothing of it."""
        try:
            installed = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None  # a login node: nothing here to compare with
        if installed == self.version:
            return None
        return (
            f"arguments were checked against {self.package} {self.version} ({self.date}), but {installed} is "
            "installed here; `make snapshot` writes down what that accepts"
        )


def snapshot_path(package: str) -> Path:
    return Path(__file__).with_name(f"{package}.json")


@functools.cache
def load_snapshot(package: str) -> Snapshot:
    """The one shipped for ``sglang``, ``sglang-router`` or ``megatron-core``."""
    return Snapshot.model_validate_json(snapshot_path(package).read_bytes())


@dataclass(frozen=True)
class Interval:
    """Numbers that make sense where the engine's own type says only "a number"."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        low = f"{'over' if self.low_open else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and {'under' if self.high_open else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class Spelling:
    """A key or flag as somebody may write it: of which argument, and whether it says the opposite."""

    name: str
    negated: bool = False


def first_match(table: Mapping[str, str], name: str) -> str | None:
    """The reason beside the first name, or pattern of names, that fits."""
    return next((reason for pattern, reason in table.items() if fnmatchcase(name, pattern)), None)


def key_spellings(arguments: Iterable[Argument]) -> dict[str, Spelling]:
    """Every key that names an argument: its own name first, then its flags with underscores."""
    arguments = list(arguments)
    spellings: dict[str, Spelling] = {a.name: Spelling(a.name) for a in arguments}
    for argument in arguments:
        for flags, negated in ((argument.flags, False), (argument.off_flags, True)):
            for flag in flags:
                spellings.setdefault(flag.lstrip("-").replace("-", "_"), Spelling(argument.name, negated))
    return spellings


def value_of(spelling: Spelling, value: Any) -> Any:
    """What the argument itself gets when a spelling of it gets ``value``."""
    return not value if spelling.negated and isinstance(value, bool) else value
