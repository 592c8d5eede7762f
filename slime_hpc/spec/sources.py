"""Where prompts come from: rows of a JSONL or parquet file, or of a reasoning-gym dataset.

Used on the login node to check a profile and by the driver to load the prompts. Every problem is a UserError
that names file and line.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_hpc.errors import UserError
from slime_hpc.spec.explain import did_you_mean
from slime_hpc.spec.run import Data, ReasoningGym

Row = dict[str, Any]

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]")


@dataclass(frozen=True)
class PromptFile:
    """``prompt_data``, parted into path and slice."""

    path: Path
    slice: slice

    @classmethod
    def parse(cls, prompt_data: Path) -> PromptFile:
        match = _SLICE.fullmatch(str(prompt_data))
        if match is not None:
            start, end = (None if match[name] is None else int(match[name]) for name in ("start", "end"))
            return cls(Path(match["path"]), slice(start, end))
        if re.search(r"@\[[^/]*$", str(prompt_data)):
            raise UserError(f"{prompt_data} does not end in a slice such as @[0:100], @[-100:] or @[:100]")
        return cls(prompt_data, slice(None))

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Place and content of each row of the slice; blank lines are no rows."""
        try:
            yield from self._parquet_rows() if self.path.suffix == ".parquet" else self._json_rows()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UserError(f"{self.path} cannot be read: {reason}") from error

    def _json_rows(self) -> Iterator[tuple[str, Row]]:
        with open(self.path, encoding="utf-8", newline="\n") as file:
            numbered: Iterator[tuple[int, str]] = ((n, line) for n, line in enumerate(file, 1) if line.strip())
            if self.slice != slice(None):
                numbered = iter(list(numbered)[self.slice])
            for number, line in numbered:
                where = f"{self.path}:{number}"
                yield where, _parse_line(line, where)

    def _parquet_rows(self) -> Iterator[tuple[str, Row]]:
        import pyarrow
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(self.path)
            start, end, _ = self.slice.indices(file.metadata.num_rows)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, row in enumerate(itertools.islice(rows, start, max(start, end)), start):
                yield f"{self.path}: row {number}", row
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{self.path} is not a parquet file: {error}") from error


def _parse_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise UserError(f"{where}: not JSON that can be read: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: a {type(row).__name__}, not an object; write {{"prompt": …}}')
    return row


def source_name(data: Data) -> str:
    """The source as a message names it."""
    return f"reasoning-gym {data.reasoning_gym.dataset}" if data.reasoning_gym else str(data.prompt_data)


GYM_KEYS = {"input_key": "input", "label_key": "label", "metadata_key": "metadata", "tool_key": None}
"""Keys of a reasoning-gym row, by the profile key that says so for a file."""


@dataclass(frozen=True)
class PromptRow:
    """One row, checked as far as that goes without a tokenizer."""

    where: str
    prompt: str | list[Row]
    """Text, or with a chat template also a list of messages."""
    label: Any
    metadata: Row
    tools: list[Row] | None


def read_prompts(data: Data, rm_type: str | None = None) -> Iterator[PromptRow]:
    """Every prompt of a source, in its order. UserError at the first row that is none, or cannot be graded."""
    keys = GYM_KEYS if data.reasoning_gym else {name: getattr(data, name) for name in GYM_KEYS}

    def value(row: Row, where: str, setting: str) -> Any:
        key = keys[setting]
        if key is not None and key not in row:
            known = ", ".join(map(repr, row)) or "none"
            raise UserError(f"{where}: no key {key!r} (data.{setting}); the row has {known}")
        return None if key is None else row[key]

    for where, row in _read_rows(data):
        label = value(row, where, "label_key")
        metadata = _require_metadata(value(row, where, "metadata_key"), where)
        _require_json([label, metadata], where)
        if rm_type == "math":
            _require_answer(label, where)
        yield PromptRow(
            where,
            _require_prompt(value(row, where, "input_key"), where, data),
            label,
            metadata,
            _require_tools(value(row, where, "tool_key"), where),
        )


def _read_rows(data: Data) -> Iterator[tuple[str, Row]]:
    if data.reasoning_gym is not None:
        return _gym_rows(data.reasoning_gym)
    assert data.prompt_data is not None
    return PromptFile.parse(data.prompt_data).rows()


def _require_prompt(value: Any, where: str, data: Data) -> str | list[Row]:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: the prompt is empty; remove the row")
        return value
    if not data.apply_chat_template:
        hint = "; set data.apply_chat_template: true if it is a list of messages" if isinstance(value, list) else ""
        raise UserError(f"{where}: the prompt is a {type(value).__name__}, not text{hint}")
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
        raise UserError(f'{where}: the prompt is neither text nor a list of messages {{"role": …, "content": …}}')
    return value


def _require_metadata(value: Any, where: str) -> Row:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: the metadata is a {type(value).__name__}, not a mapping")
    return value or {}


def _require_json(value: Any, where: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: label or metadata is no JSON value: {error}") from error


def _require_answer(label: Any, where: str) -> None:
    """What math-verify compares with: anything else would equal no reply, and nothing would be learned."""
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    if not is_number and not (isinstance(label, str) and label.strip()):
        raise UserError(f"{where}: the label is {label!r}; reward.rm_type 'math' needs the answer, as text or a number")


def _require_tools(value: Any, where: str) -> list[Row] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{where}: the tools are text, but not JSON ({error})") from error
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise UserError(f"{where}: the tools are a {type(value).__name__}, not a list of mappings")
    return value or None


def _gym_rows(recipe: ReasoningGym) -> Iterator[tuple[str, Row]]:
    """Question, answer and all that its verifier needs: the entry's own metadata, and ``reasoning_gym``."""
    dataset = open_reasoning_gym(recipe)
    for index in range(recipe.size):
        where = f"reasoning-gym {recipe.dataset}[{index}]"
        try:
            entry = dataset[index]
        except Exception as error:
            raise UserError(f"{where} cannot be made: {type(error).__name__}: {error}; change its params") from error
        metadata = {**entry["metadata"], "reasoning_gym": recipe.model_dump(mode="json")}
        yield where, {"input": entry["question"], "label": entry["answer"], "metadata": metadata}


def has_reasoning_gym() -> bool:
    """Is the package installed here? A login node may lack it."""
    return importlib.util.find_spec("reasoning_gym") is not None


def open_reasoning_gym(recipe: ReasoningGym) -> Any:
    """The package's dataset. UserError where it is missing, or knows no such dataset or params. Takes seconds."""
    if not has_reasoning_gym():
        raise UserError("reasoning-gym is not installed; install slime-hpc[engines]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        from reasoning_gym.factory import DATASETS, create_dataset
    name = recipe.dataset
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no dataset {name!r}{did_you_mean(name, DATASETS)}")
    try:
        return create_dataset(name, size=recipe.size, seed=recipe.seed, **recipe.params)
    except Exception as error:
        known = sorted(DATASETS[name][1].__dataclass_fields__.keys() - {"size", "seed"})
        raise UserError(
            f"reasoning-gym's {name} does not take these params: {type(error).__name__}: {error};"
            f" it has {', '.join(known)}"
        ) from error
