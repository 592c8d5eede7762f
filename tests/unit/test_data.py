"""The prompt source: order, cursor, and what bad files get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_hpc.errors import UserError
from slime_hpc.rollout.data import PromptSource
from slime_hpc.spec.run import Data


class LetterTokenizer:
    """One token a letter."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def source(path: Path, max_tokens: int = 100, **data: Any) -> PromptSource:
    return PromptSource(Data(prompt_data=path, input_key="q", **data), LetterTokenizer(), max_tokens=max_tokens)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return write(tmp_path / "five.jsonl", *({"q": letter, "a": letter.upper()} for letter in "abcde"))


def texts(source: PromptSource, count: int) -> str:
    return "".join(draw.prompt.text for draw in source.next(count))


def test_draws_carry_tokens_label_and_a_running_index(five: Path) -> None:
    prompts = source(five, label_key="a", rollout_shuffle=False)
    assert [d.group_index for d in prompts.next(3)] == [0, 1, 2]
    draw = prompts.next(1)[0]
    assert (draw.group_index, draw.prompt.text, draw.prompt.tokens, draw.prompt.label) == (3, "d", (100,), "D")


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own(five: Path) -> None:
    prompts = source(five)
    epochs = [texts(prompts, 5) for _ in range(4)]
    assert {"".join(sorted(e)) for e in epochs} == {"abcde"}
    assert len(set(epochs)) > 1
    assert epochs == [texts(again, 5) for again in [source(five)] for _ in range(4)]
    assert texts(source(five, rollout_seed=7), 20) != "".join(epochs)


def test_a_batch_may_cross_the_end_of_an_epoch(five: Path) -> None:
    whole, batched = source(five), source(five)
    assert texts(whole, 12) == texts(batched, 3) + texts(batched, 4) + texts(batched, 5)


def test_restore_goes_on_where_the_state_was_taken(five: Path) -> None:
    first = source(five)
    first.next(7)
    state = json.loads(json.dumps(first.state()))
    resumed = source(five)
    resumed.restore(state)
    assert resumed.next(9) == first.next(9)


def test_restore_refuses_another_file(five: Path, tmp_path: Path) -> None:
    other = source(write(tmp_path / "two.jsonl", {"q": "x"}, {"q": "y"}))
    with pytest.raises(UserError, match="2 usable prompts, but 5"):
        other.restore(source(five).state())


def test_chat_template_takes_text_and_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"q": "hi"}, {"q": [{"role": "system", "content": "be"}]})
    prompts = source(path, apply_chat_template=True, rollout_shuffle=False)
    assert [d.prompt.text for d in prompts.next(2)] == ["<user>hi<assistant>", "<system>be<assistant>"]


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", {"q": "aaaa"}, {"q": "bbb"}, {"q": "ccccc"})
    prompts = source(path, max_tokens=3)
    assert (len(prompts), prompts.too_long, texts(prompts, 2)) == (1, 2, "bbb" * 2)
    with pytest.raises(UserError, match="all 3 prompts have more than 2 tokens"):
        source(path, max_tokens=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"q": "a"}\n\n{"q": oops}\n', r"bad.jsonl:3: not JSON \(Expecting value at column 7\)"),
        ('{"q": "a"}\n[1]\n', "bad.jsonl:2: a list, not an object"),
        ('{"p": "a", "r": 1}\n', r"bad.jsonl:1: no key 'q' \(data.input_key\); the line has 'p', 'r'"),
        ('{"q": ["a"]}\n', "bad.jsonl:1: 'q' is a list, not text"),
        ('{"q": ""}\n', "bad.jsonl:1: the prompt is empty"),
        ("\n", "bad.jsonl holds no prompt"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        source(path)


def test_a_missing_label_and_a_missing_file_are_named(five: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"five.jsonl:1: no key 'label' \(data.label_key\)"):
        source(five, label_key="label")
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl"):
        source(tmp_path / "none.jsonl")
