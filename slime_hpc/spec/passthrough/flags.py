"""Trailing ``--sglang-…`` and Megatron options of a command line → keys of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime_hpc.errors import Finding, ProfileError
from slime_hpc.spec.explain import did_you_mean, homes_of
from slime_hpc.spec.passthrough.arguments import Argument
from slime_hpc.spec.passthrough.keys import ENGINES, Engine, set_over
from slime_hpc.spec.run import RunSpec
from slime_hpc.spec.yaml_tree import Tree, parse_value


@dataclass(frozen=True)
class Flag:
    """What one spelling on the command line means."""

    engine: Engine
    argument: Argument
    off: bool


def apply_flags(tree: Tree, words: Sequence[str]) -> None:
    """``--sglang-mem-fraction-static 0.8 --weight-decay=0.1``, over the file; ProfileError with all findings."""
    known = _known_flags() if words else {}
    findings: list[Finding] = []
    for text, values in _groups(words):
        name, equals, inline = text.partition("=")
        if name not in known:
            findings.append(Finding("", _unknown(name, known), name))
            continue
        flag = known[name]
        try:
            value = _value(flag, name, [inline, *values] if equals else values)
        except ProfileError as error:
            findings += error.findings
            continue
        set_over(tree, (*flag.engine.path, flag.argument.name), value, name)
    if findings:
        raise ProfileError(findings)


def _known_flags() -> dict[str, Flag]:
    """By their text on our command line. A field's own name with dashes is a flag, too, where no other has it."""
    known: dict[str, Flag] = {}
    for engine in ENGINES:
        for argument in engine.arguments().values():
            own_name = "--" + argument.name.replace("_", "-")
            for flags, off in ((argument.flags, False), (argument.off_flags, True), ((own_name,), False)):
                for flag in flags:
                    known.setdefault(engine.prefix + flag.removeprefix("--"), Flag(engine, argument, off))
    return known


def _groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words up to the next one. ``-1`` is a value."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append((word, []))
        else:
            groups[-1][1].append(word)
    yield from groups


def _unknown(name: str, known: dict[str, Flag]) -> str:
    homes = homes_of(RunSpec, name.removeprefix("--").replace("-", "_"))
    if homes:
        return f"not a Megatron or SGLang option; did you mean --set {homes[0]}=…?"
    accepted = [text for text, flag in known.items() if flag.engine.refusal(flag.argument.name) is None]
    return f"not a Megatron or SGLang option{did_you_mean(name, accepted) or did_you_mean(name, known)}"


def _value(flag: Flag, name: str, words: list[str]) -> Any:
    argument = flag.argument
    if argument.is_switch:
        return _switch(flag, name, words)
    if not words:
        raise ProfileError([Finding("", "needs a value", name)])
    if argument.element is not None and not (len(words) == 1 and words[0].startswith(("[", "{"))):
        return [_parse(word, argument.element, name) for word in words]
    if len(words) > 1:
        raise ProfileError([Finding("", f"takes one value, but {' '.join(words)!r} follow it", name)])
    only_text = set(argument.types) <= {"str", "null"}
    return _parse(words[0], "str" if only_text else "any", name)


def _switch(flag: Flag, name: str, words: list[str]) -> bool:
    """A bare flag; ``=false``, or ``false`` after it, is understood as well."""
    if len(words) > 1 or (words and words[0].lower() not in ("true", "false")):
        raise ProfileError([Finding("", f"takes no value, but {' '.join(words)!r} follows it", name)])
    said = not words or words[0].lower() == "true"
    return said != flag.off


def _parse(word: str, kind: str, name: str) -> Any:
    """Text stays text, whatever it looks like; all else follows the file's scalar rules."""
    return word if kind == "str" else parse_value(word, name)
