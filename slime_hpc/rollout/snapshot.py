"""``python -m slime_hpc.rollout.snapshot``: write down which arguments the installed SGLang and its router take."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import types
import typing
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from slime_hpc.spec.passthrough.arguments import Argument, Snapshot, snapshot_path, type_names


def take_snapshots() -> list[Snapshot]:
    from sglang.srt.server_args import ServerArgs
    from sglang_router.router_args import RouterArgs

    return [_take_snapshot("sglang", ServerArgs), _take_snapshot("sglang-router", RouterArgs)]


def _take_snapshot(package: str, args_class: Any) -> Snapshot:
    """Every option of its command line that sets a field of the class."""
    parser = argparse.ArgumentParser(add_help=False)
    args_class.add_cli_args(parser)
    hints = typing.get_type_hints(args_class)
    found: dict[str, Argument] = {}
    for action in parser._actions:
        if action.dest in hints:
            argument = _argument(action, hints[action.dest])
            found[action.dest] = _merged(found[action.dest], argument) if action.dest in found else argument
    return Snapshot(
        package=package,
        version=importlib.metadata.version(package),
        date=datetime.now(UTC).date().isoformat(),
        arguments=tuple(sorted(found.values(), key=lambda argument: argument.name)),
    )


def _argument(action: argparse.Action, hint: Any) -> Argument:
    # Fields that SGLang annotates as text and whose flag takes JSON get what the JSON means.
    kinds = ("dict", "null") if action.type is json.loads else type_names(hint)
    switch = action.nargs == 0
    off = tuple(flag for flag in action.option_strings if switch and flag.startswith("--no-"))
    return Argument(
        name=action.dest,
        types=kinds,
        flags=tuple(flag for flag in action.option_strings if flag.startswith("--") and flag not in off),
        off_flags=off,
        choices=_choices(action, hint),
        help=_first_sentence(action.help or ""),
    )


def _merged(one: Argument, other: Argument) -> Argument:
    """A deprecated spelling of the same field is one more flag."""
    return one.model_copy(update={"flags": one.flags + other.flags, "off_flags": one.off_flags + other.off_flags})


def _choices(action: argparse.Action, hint: Any) -> tuple[Any, ...]:
    """Sorted: the router's parsers come out of a hash table, in another order each time."""
    known = [choice for choice in action.choices or _literals(hint) if choice is not None]
    return tuple(sorted(known, key=lambda choice: (str(type(choice)), choice)))


def _literals(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for alternative in typing.get_args(hint):
            yield from _literals(alternative)


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\. ", " ".join(text.split()))[0]
    return sentence if len(sentence) <= 120 else sentence[:117] + "..."


if __name__ == "__main__":
    for snapshot in take_snapshots():
        snapshot.write(snapshot_path(snapshot.package))
