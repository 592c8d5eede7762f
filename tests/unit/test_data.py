"""Prompts from files and from reasoning-gym: what is read, in which order, and what bad rows get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pyarrow
import pytest
from pyarrow import parquet

from slime_hpc.errors import UserError
from slime_hpc.rollout.data import PromptSet, PromptSource, load_prompts
from slime_hpc.spec.run import Data


class LetterTokenizer:
    """One token a letter."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        if conversation[0]["role"] == "assistant":
            raise jinja2.TemplateError("the user speaks first")
        names = "".join(f"[{tool['name']}]" for tool in tools or [])
        return names + "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def load(path: Path | str | None, max_tokens: int = 100, **data: Any) -> PromptSet:
    source = {} if path is None else {"prompt_data": Path(path), "input_key": "q"}
    return load_prompts(Data(**source, **data), LetterTokenizer(), max_tokens=max_tokens)


def source(path: Path, **data: Any) -> PromptSource:
    return PromptSource(load(path, **data), Data(prompt_data=path, **data))


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
    assert (draw.group_index, draw.prompt.text, list(draw.prompt.tokens), draw.prompt.label) == (3, "d", [100], "D")


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


@pytest.mark.parametrize(
    ("rows", "data", "changed"),
    [
        ([{"q": "a"}, {"q": "b"}], {}, "prompts 3 → 2, fingerprint"),
        ([{"q": "a"}, {"q": "c"}, {"q": "b"}], {}, r"\(fingerprint '\w+' → '\w+'\)"),
        ([{"q": "a"}, {"q": "b"}, {"q": "c"}], {"rollout_seed": 7}, r"\(order 42 → 7\)"),
        ([{"q": "a"}, {"q": "b"}, {"q": "c"}], {"rollout_shuffle": False}, r"\(order 42 → None\)"),
    ],
)
def test_restore_refuses_other_prompts_or_another_order(
    tmp_path: Path, rows: list[Any], data: dict[str, Any], changed: str
) -> None:
    state = source(write(tmp_path / "x.jsonl", {"q": "a"}, {"q": "b"}, {"q": "c"})).state()
    with pytest.raises(UserError, match=f"x.jsonl is not what it was .*{changed}"):
        source(write(tmp_path / "x.jsonl", *rows), **data).restore(state)


def test_labels_and_metadata_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    variants = [{"q": "a", "l": 1, "m": {}}, {"q": "a", "l": 2, "m": {}}, {"q": "a", "l": 1, "m": {"x": 1}}]
    prints = {
        load(write(tmp_path / f"{i}.jsonl", row), label_key="l", metadata_key="m").fingerprint()
        for i, row in enumerate(variants)
    }
    assert len(prints) == 3


def test_chat_template_takes_text_and_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"q": "hi"}, {"q": [{"role": "system", "content": "be"}]})
    prompts = load(path, apply_chat_template=True)
    assert [p.text for p in prompts.prompts] == ["<user>hi<assistant>", "<system>be<assistant>"]


def test_tools_go_into_the_template(tmp_path: Path) -> None:
    tools = [{"name": "search"}]
    rows = ({"q": "a", "t": tools}, {"q": "b", "t": json.dumps(tools)}, {"q": "c", "t": None})
    prompts = load(write(tmp_path / "t.jsonl", *rows), apply_chat_template=True, tool_key="t")
    texts = ["[search]<user>a<assistant>", "[search]<user>b<assistant>", "<user>c<assistant>"]
    assert [p.text for p in prompts.prompts] == texts


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", {"q": "aaaa"}, {"q": "bbb"}, {"q": "ccccc"})
    prompts = load(path, max_tokens=3)
    assert ([p.text for p in prompts.prompts], prompts.too_long) == (["bbb"], 2)
    with pytest.raises(UserError, match="all 3 prompts have more than 2 tokens"):
        load(path, max_tokens=2)


@pytest.mark.parametrize(
    ("slice_", "letters"),
    [("[1:3]", "bc"), ("[-2:]", "de"), ("[:-3]", "ab"), ("[:]", "abcde"), ("[3:99]", "de")],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices(five: Path, kind: str, slice_: str, letters: str) -> None:
    path = five.with_suffix(f".{kind}")
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"q": list("abcde"), "a": list("ABCDE")}), path)
    else:
        path.write_text("\n" + path.read_text().replace("\n", "\n\n"))  # blank lines are no rows
    prompts = load(f"{path}@{slice_}", label_key="a")
    assert [(p.text, p.label) for p in prompts.prompts] == [(letter, letter.upper()) for letter in letters]


def test_only_rows_of_the_slice_must_be_good(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"q": "a"}\noops\n{"q": "b"}\n')
    assert [p.text for p in load(f"{path}@[2:]").prompts] == ["b"]
    with pytest.raises(UserError, match=r"x.jsonl:2: not JSON"):
        load(f"{path}@[1:]")


@pytest.mark.parametrize("ending", ["@[1]", "@[a:b]", "@[1:2", "@[1:2:3]"])
def test_what_is_no_slice_is_named(five: Path, ending: str) -> None:
    with pytest.raises(UserError, match="does not end in a slice such as"):
        load(f"{five}{ending}")


def test_parquet_has_lists_of_messages_and_metadata(tmp_path: Path) -> None:
    rows = [{"q": [{"role": "user", "content": "hi"}], "m": {"level": 3}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    (prompt,) = load(tmp_path / "x.parquet", apply_chat_template=True, metadata_key="m").prompts
    assert (prompt.text, prompt.metadata) == ("<user>hi<assistant>", {"level": 3})


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"q": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert [p.text for p in load(path).prompts] == ["a\u2028b\x85c"]


def test_prompts_of_an_evaluation_set_that_are_trained_on(five: Path, tmp_path: Path) -> None:
    training = load(five)
    both = load(write(tmp_path / "eval.jsonl", {"q": "a"}, {"q": "x"}, {"q": "b"}))
    kept, left = both.compared_with(training, held_out=False), both.compared_with(training, held_out=True)
    assert (len(kept), kept.trained) == (3, 2)
    assert ([p.text for p in left.prompts], left.trained) == (["x"], 2)
    with pytest.raises(UserError, match="the training data has all its 5 prompts"):
        training.compared_with(training, held_out=True)


def test_reasoning_gym_makes_the_same_tasks_for_the_same_seed() -> None:
    def tasks(seed: int) -> PromptSet:
        params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
        return load(None, reasoning_gym={"dataset": "basic_arithmetic", "size": 20, "seed": seed, "params": params})

    assert tasks(1).fingerprint() == tasks(1).fingerprint() != tasks(2).fingerprint()
    for prompt in tasks(1).prompts:
        sum_ = prompt.text.removeprefix("Calculate ").removesuffix(".")
        assert int(prompt.label) == eval(sum_)
        assert prompt.metadata["expression"] == sum_


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"q": "a"}\n\n{"q": oops}\n', r"bad.jsonl:3: not JSON \(Expecting value at column 7\)"),
        ('{"q": "a"}\n[1]\n', "bad.jsonl:2: a list, not an object"),
        ('{"q": "a", "n": ' + "1" * 5000 + "}\n", r"bad.jsonl:1: not JSON that can be read: Exceeds the limit"),
        ('{"q": "\\ud800"}\n', "bad.jsonl:1: the prompt is not valid Unicode: .*surrogates not allowed"),
        ('{"p": "a", "r": 1}\n', r"bad.jsonl:1: no key 'q' \(data.input_key\); the row has 'p', 'r'"),
        ('{"q": ["a"]}\n', "bad.jsonl:1: the prompt is a list, not text; set data.apply_chat_template"),
        ('{"q": null}\n', "bad.jsonl:1: the prompt is a NoneType, not text"),
        ('{"q": " "}\n', "bad.jsonl:1: the prompt is empty"),
        ("\n", "bad.jsonl holds no prompt"),
        ("\xff\n", "bad.jsonl cannot be read: 'utf-8' codec"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=says):
        load(path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"q": []}, "x.jsonl:1: the prompt is neither text nor a list of messages"),
        ({"q": ["hi"]}, "x.jsonl:1: the prompt is neither text nor a list of messages"),
        ({"q": ""}, "x.jsonl:1: the prompt is empty"),
        ({"q": [{"role": "assistant", "content": "x"}]}, "chat template cannot take it: the user speaks first"),
        ({"q": "a", "t": "[oops"}, "x.jsonl:1: the tools are text, but not JSON"),
        ({"q": "a", "t": {"name": "x"}}, "x.jsonl:1: the tools are a dict, not a list"),
        ({"q": "a", "m": "x"}, "x.jsonl:1: the metadata is a str, not a mapping"),
    ],
)
def test_bad_messages_tools_and_metadata_are_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "x.jsonl", {"t": None, "m": None} | row)
    with pytest.raises(UserError, match=says):
        load(path, apply_chat_template=True, tool_key="t", metadata_key="m")


def test_a_label_that_no_json_can_hold_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"q": ["a"], "l": [b"x"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x.parquet: row 0: label or metadata is no JSON value"):
        load(tmp_path / "x.parquet", label_key="l")


def test_a_missing_label_and_unreadable_files_are_named(five: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"five.jsonl:1: no key 'label' \(data.label_key\)"):
        load(five, label_key="label")
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match=rf"{name} cannot be read: .*No such file"):
            load(tmp_path / name)
    (tmp_path / "x.parquet").write_text("text")
    with pytest.raises(UserError, match=r"x.parquet is not a parquet file"):
        load(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"dataset": "basic_arithmetics"}, "no dataset 'basic_arithmetics'; did you mean 'basic_arithmetic'"),
        ({"dataset": "basic_arithmetic", "params": {"digits": 2}}, "does not take these params: .*digits.*max_digits"),
        ({"dataset": "basic_arithmetic", "params": {"max_digits": 0}}, "does not take these params: AssertionError"),
    ],
)
def test_reasoning_gym_refuses_unknown_names_and_params(recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(None, reasoning_gym={"size": 1, **recipe})
