"""What pydantic found, in the words of whoever wrote the file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from slime_hpc.errors import Finding
from slime_hpc.spec.secrets import MASK, is_secret
from slime_hpc.spec.yaml_tree import KeyPath, Tree

M = TypeVar("M", bound=BaseModel)
Location = tuple[int | str, ...]

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list: [a, b]",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
}


def validate(model: type[M], tree: Tree) -> tuple[M | None, list[Finding]]:
    """The tree's values as a model, strictly: no number for a text, no text for a number.

    Where unknown keys are all that is wrong, the model without them is returned beside the findings, so that the
    remaining checks can run as well.
    """
    values = tree.values
    try:
        return _parse(model, values), []
    except ValidationError as e:
        errors = e.errors(include_url=False)
    misspelt = dict(_misspelt(model, errors))
    told = [error for error in errors if error["type"] != "missing" or error["loc"] not in misspelt.values()]
    findings = list(_unique(_explain(error, model, tree) for error in told))
    if any(error["type"] != "extra_forbidden" for error in errors):
        return None, findings
    try:
        return _parse(model, _without(values, [error["loc"] for error in errors])), findings
    except ValidationError:
        return None, findings  # what else is wrong hangs on the misspelt key


def _misspelt(model: type[BaseModel], errors: Iterable[Any]) -> Iterator[tuple[Location, Location]]:
    """Unknown keys, each with the missing one that is most likely meant by it."""
    errors = list(errors)
    missing = [error["loc"] for error in errors if error["type"] == "missing"]
    for error in errors:
        if error["type"] == "extra_forbidden":
            *parents, key = error["loc"]
            close = difflib.get_close_matches(str(key), keys_of(_model_at(model, map(str, parents))), n=1)
            if close and (*parents, close[0]) in missing:
                yield error["loc"], (*parents, close[0])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or the known words where none is close and they are few."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1) or [k for k in known if word and k.startswith(word)]
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if 0 < len(known) <= 20 else ""


def show(value: object) -> str:
    """A value as it would stand in YAML, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def homes_of(model: type[BaseModel], key: str) -> list[str]:
    """Every dotted path under which a key of that name is known."""
    return sorted(_homes(model, key))


def keys_of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's annotations by the keys that a file uses."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _parse(model: type[M], values: object) -> M:
    # By way of JSON, where pydantic's strict mode still takes a list for a tuple and text for a Path.
    return model.model_validate_json(json.dumps(values), strict=True)


def _without(values: Any, locations: Iterable[Location]) -> Any:
    copy = json.loads(json.dumps(values))
    for location in locations:
        parent = copy
        for key in location[:-1]:
            parent = parent[key]
        del parent[location[-1]]
    return copy


def _unique(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding a key: a value that fits no member of a union has an error for each."""
    seen: set[str] = set()
    for finding in findings:
        if finding.path not in seen:
            seen.add(finding.path)
            yield finding


def _explain(error: Any, model: type[BaseModel], tree: Tree) -> Finding:
    path = location = tuple(str(part) for part in error["loc"])
    if error["type"] != "missing":
        while path not in tree:
            path = path[:-1]  # pydantic appends the members of a union
    value = tree.get(path)
    message = _message(error, model, location, value)
    if path[:2] == ("environment", "variables") and (len(path) == 2 or is_secret(path[2])):
        message = message.replace(show(value), MASK)
    return Finding(".".join(path), message, tree.where(path))


def _message(error: Any, root: type[BaseModel], location: KeyPath, value: object) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "is missing, and has no default"
    if kind == "extra_forbidden":
        return _unknown_key(root, location)
    if kind == "literal_error":
        return f"{show(value)} is not one of {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _KINDS:
        quote = "; write it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
        return f"{show(value)} is not {_KINDS[kind]}{quote}"
    return f"{show(value)}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _unknown_key(root: type[BaseModel], location: KeyPath) -> str:
    *parents, key = location
    known = keys_of(_model_at(root, parents))
    homes = [] if difflib.get_close_matches(key, known) else homes_of(root, key)
    if homes:
        return f"unknown key; did you mean {' or '.join(homes)}?"
    return f"unknown key{did_you_mean(key, known)}"


def _model_at(root: type[BaseModel], parents: Iterable[str]) -> type[BaseModel]:
    annotation: Any = root
    for key in parents:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            annotation = _without_none(keys_of(annotation)[key])
    model: type[BaseModel] = annotation
    return model


def _without_none(annotation: Any) -> Any:
    """``X`` of ``X | None``."""
    return get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation


def _homes(model: type[BaseModel], key: str, prefix: str = "") -> Iterator[str]:
    for name, annotation in keys_of(model).items():
        if name == key:
            yield prefix + name
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _homes(annotation, key, f"{prefix}{name}.")
