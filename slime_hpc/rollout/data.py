"""Prompts with their tokens, in an order that a seed and a cursor fix."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2

from slime_hpc.errors import UserError
from slime_hpc.spec.run import Data
from slime_hpc.spec.sources import PromptRow, read_prompts, source_name


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is sent: text after templating, and its tokens."""

    text: str
    tokens: array[int]
    """An array, since a list takes nine times the memory, and there may be millions."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """A prompt drawn in a round; ``group_index`` counts draws over the whole run."""

    group_index: int
    prompt: Prompt


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one source that leave room for a response, in the source's order."""

    source: str
    prompts: Sequence[Prompt]
    too_long: int = 0
    """Prompts left out because they leave no such room."""
    trained: int = 0
    """Prompts of an evaluation set that the training data has too."""

    def __len__(self) -> int:
        return len(self.prompts)

    def draws(self) -> list[Draw]:
        """Each prompt once."""
        return [Draw(index, prompt) for index, prompt in enumerate(self.prompts)]

    def fingerprint(self) -> str:
        """Equal for equal prompts, labels and metadata in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(prompt.tokens.tobytes() + json.dumps([prompt.label, prompt.metadata]).encode())
        return digest.hexdigest()

    def compared_with(self, training: PromptSet, *, held_out: bool) -> PromptSet:
        """This set with ``trained`` counted; with ``held_out`` those are left out. UserError if none is left."""
        seen = {prompt.text for prompt in training.prompts}
        new = [prompt for prompt in self.prompts if prompt.text not in seen]
        if held_out and not new:
            raise UserError(f"{self.source}: the training data has all its {len(self)} prompts; hold other ones out")
        return PromptSet(self.source, new if held_out else self.prompts, self.too_long, len(self) - len(new))


def load_prompts(data: Data, tokenizer: Tokenizer, *, max_tokens: int, rm_type: str | None = None) -> PromptSet:
    """All prompts of at most ``max_tokens``. UserError with file:line for anything that is not a prompt."""
    prompts = list(_tokenize(read_prompts(data, rm_type), tokenizer, data.apply_chat_template))
    source = source_name(data)
    if not prompts:
        raise UserError(f"{source} holds no prompt")
    short = [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]
    if not short:
        raise UserError(
            f"{source}: all {len(prompts)} prompts have more than {max_tokens} tokens, what the engine's"
            " context leaves beside the response; shorten them or lower sampling.rollout_max_response_len"
        )
    return PromptSet(source, short, too_long=len(prompts) - len(short))


def _tokenize(rows: Iterable[PromptRow], tokenizer: Tokenizer, apply_chat_template: bool) -> Iterator[Prompt]:
    for row in rows:
        text = _apply_template(row, tokenizer) if apply_chat_template else str(row.prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{row.where}: the prompt is not valid Unicode: {error}") from error
        tokens = array("i", tokenizer.encode(text, add_special_tokens=False))
        yield Prompt(text, tokens, row.label, row.metadata)


def _apply_template(row: PromptRow, tokenizer: Tokenizer) -> str:
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    try:
        return str(tokenizer.apply_chat_template(messages, tools=row.tools, tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        # A template raises by itself for roles in an order that it does not know; ValueError: there is no template.
        raise UserError(f"{row.where}: the model's chat template cannot take it: {error}") from error


class PromptSource:
    """An endless stream of prompts, epoch after epoch, each shuffled by seed + epoch."""

    def __init__(self, prompts: PromptSet, data: Data) -> None:
        self.set = prompts
        self._data = data
        self._drawn = 0
        self._order: tuple[int, list[int]] | None = None
        self._fingerprint = prompts.fingerprint()

    def next(self, count: int) -> list[Draw]:
        """The next ``count`` prompts; an epoch's end and the next one's head may share a batch."""
        draws = [Draw(n, self._at(n)) for n in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return draws

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON, and what it is a place in."""
        order = self._data.rollout_seed if self._data.rollout_shuffle else None
        return {"drawn": self._drawn, "prompts": len(self.set), "fingerprint": self._fingerprint, "order": order}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the draw that ``state`` was taken at. UserError if prompts or order have changed since."""
        now = self.state() | {"drawn": state["drawn"]}
        changed = [f"{key} {state[key]!r} → {now[key]!r}" for key in now if state[key] != now[key]]
        if changed:
            raise UserError(
                f"{self.set.source} is not what it was when the checkpoint was written ({', '.join(changed)}), so the"
                " run's place in the data means nothing; restore data and profile, or start a new run"
            )
        self._drawn = state["drawn"]

    def _at(self, draw: int) -> Prompt:
        epoch, position = divmod(draw, len(self.set))
        return self.set.prompts[self._epoch_order(epoch)[position]]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.set)))
            if self._data.rollout_shuffle:
                random.Random(self._data.rollout_seed + epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
