"""Prompts from a JSONL file, in an order that a seed and a cursor fix."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_hpc.errors import UserError
from slime_hpc.spec.run import Data


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is sent: text after templating, and its tokens."""

    text: str
    tokens: tuple[int, ...]
    label: Any = None


@dataclass(frozen=True)
class Draw:
    """A prompt drawn in a round; ``group_index`` counts draws over the whole run."""

    group_index: int
    prompt: Prompt


class PromptSource:
    """An endless stream of prompts, epoch after epoch, each shuffled by seed + epoch.

    ``max_tokens`` is the longest prompt that leaves room for a response; longer ones are left out
    and counted in ``too_long``. UserError with file:line for anything that is not a prompt.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self._data = data
        prompts = list(_read_prompts(data, tokenizer))
        self._prompts = [p for p in prompts if len(p.tokens) <= max_tokens]
        self.too_long = len(prompts) - len(self._prompts)
        if not prompts:
            raise UserError(f"{data.prompt_data} holds no prompt; write one JSON object a line")
        if not self._prompts:
            raise UserError(
                f"{data.prompt_data}: all {len(prompts)} prompts have more than {max_tokens} tokens, what the model's"
                " context leaves beside the response; shorten them or lower sampling.rollout_max_response_len"
            )
        self._drawn = 0
        self._order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, count: int) -> list[Draw]:
        """The next ``count`` prompts; an epoch's end and the next one's head may share a batch."""
        draws = [Draw(n, self._at(n)) for n in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return draws

    def state(self) -> dict[str, int]:
        """The cursor, as JSON."""
        return {"drawn": self._drawn, "prompts": len(self._prompts)}

    def restore(self, state: dict[str, int]) -> None:
        """Go on after the draw that ``state`` was taken at. UserError if the file has changed in length since."""
        if state["prompts"] != len(self._prompts):
            raise UserError(
                f"{self._data.prompt_data} has {len(self._prompts)} usable prompts, but {state['prompts']} when the"
                " checkpoint was written, so its place in the data means nothing; restore the file or start a new run"
            )
        self._drawn = state["drawn"]

    def _at(self, draw: int) -> Prompt:
        epoch, position = divmod(draw, len(self._prompts))
        return self._prompts[self._epoch_order(epoch)[position]]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            if self._data.rollout_shuffle:
                random.Random(self._data.rollout_seed + epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


def _read_prompts(data: Data, tokenizer: Tokenizer) -> Iterator[Prompt]:
    for where, row in _read_rows(data.prompt_data):
        text = _prompt_text(_value(row, data.input_key, where, "data.input_key"), where, data, tokenizer)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if not tokens:
            raise UserError(f"{where}: the prompt is empty; remove the line")
        label = None if data.label_key is None else _value(row, data.label_key, where, "data.label_key")
        yield Prompt(text, tuple(tokens), label)


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.prompt_data: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}:{number}", _parse_row(line, f"{path}:{number}")


def _parse_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: a {type(row).__name__}, not an object; write {{"prompt": …}}')
    return row


def _value(row: dict[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in row:
        raise UserError(f"{where}: no key {key!r} ({setting}); the line has {', '.join(map(repr, row)) or 'none'}")
    return row[key]


def _prompt_text(value: Any, where: str, data: Data, tokenizer: Tokenizer) -> str:
    """A string, or with a chat template also a list of messages."""
    if not data.apply_chat_template:
        if not isinstance(value, str):
            raise UserError(
                f"{where}: {data.input_key!r} is a {type(value).__name__}, not text;"
                " set data.apply_chat_template: true if it is a list of messages"
            )
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
