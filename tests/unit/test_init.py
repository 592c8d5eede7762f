"""`slime-hpc init`: what it writes, what the loader says of what is left open, and that it loads once filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_hpc.errors import ProfileError
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.spec.template import profile_template
from slime_hpc.spec.yaml_tree import parse_yaml

Cli = Callable[..., tuple[int, str, str]]
OPEN = (
    "name", "cluster", "run_dir", "model.hf_checkpoint", "trainer.partition", "rollout.partition", "data.prompt_data"
)  # fmt: skip


@pytest.fixture
def here(quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and labelled prompts."""
    directory = quickstart.parent
    quickstart.unlink()
    (directory / "math.jsonl").write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")
    monkeypatch.chdir(directory)
    return directory


def findings(path: Path, *sets: str) -> list[str]:
    with pytest.raises(ProfileError) as error:
        load_profile(path, sets=sets)
    return str(error.value).splitlines()


def load(path: Path, *sets: str) -> Profile:
    return load_profile(path, sets=sets)


def test_placeholders_are_named_with_their_lines(cli: Cli, here: Path) -> None:
    code, out, _ = cli("init")
    assert code == 0
    assert out == (
        f"wrote profile.yaml; to be filled in: {', '.join(OPEN)}. Then:\n"
        "  slime-hpc plan profile.yaml      # checks every key, shows the job and what it may cost\n"
        "  slime-hpc submit profile.yaml    # --watch looks on to the end\n"
    )
    told = findings(here / "profile.yaml")
    assert [re.sub(r"^profile\.yaml:\d+: ", "", line).partition(":")[0] for line in told] == list(OPEN)
    assert all(": is still to be filled in, with a" in line for line in told)
    assert told[0] == "profile.yaml:2: name: is still to be filled in, with a name"
    code, _, err = cli("plan", "profile.yaml")
    assert code == 2 and err.startswith("error: 7 things to mend:\n")


def test_it_loads_once_filled_in(cli: Cli, here: Path) -> None:
    cli("init")
    path = here / "profile.yaml"
    text = path.read_text()
    for placeholder, value in (
        ("a name", "first"), ("a cluster profile", "devcluster"), ("a new directory", "runs/first"),
        ("a directory", "model"), ("a partition", "train"), ("a partition", "rollout"), ("a file", "math.jsonl"),
    ):  # fmt: skip
        assert f"<fill in {placeholder}>" in text
        text = text.replace(f"<fill in {placeholder}>", value, 1)
    path.write_text(text)
    spec = load(path).spec
    assert (spec.name, spec.run_dir, spec.data.prompt_data) == ("first", here / "runs/first", here / "math.jsonl")
    assert (spec.trainer.partition, spec.rollout.partition) == ("train", "rollout")


def test_options_fill_it_in(cli: Cli, here: Path) -> None:
    options = ("--name", "first", "--cluster", "devcluster", "--model", "model", "--data", "math.jsonl")
    code, out, _ = cli("init", *options)
    assert code == 0 and out.startswith("wrote profile.yaml. Then:\n")
    spec = load(here / "profile.yaml").spec
    assert (spec.name, spec.run_dir, spec.model.hf_checkpoint) == ("first", here / "runs/first", here / "model")
    assert (spec.trainer.partition, spec.rollout.partition) == ("train", "rollout")
    assert cli("plan", "profile.yaml")[0] == 0


def test_paths_are_written_as_the_file_will_read_them(cli: Cli, here: Path) -> None:
    (here / "deep").mkdir()
    (here / "site.yaml").write_text(
        "name: site\ndevice: cpu\npartitions: {all: {gpus_per_node: 2, cpus_per_node: 8}}\n"
    )
    options = ("--name", "first", "--cluster", "site.yaml", "--model", "model", "--data", f"{here}/math.jsonl")
    assert cli("init", "deep/p.yaml", *options)[0] == 0
    profile = load(here / "deep" / "p.yaml")
    assert (profile.cluster.name, profile.spec.trainer.partition, profile.spec.rollout.partition) == (
        "site",
        "all",
        "all",
    )
    assert (profile.spec.model.hf_checkpoint, profile.spec.data.prompt_data) == (here / "model", here / "math.jsonl")
    assert "hf_checkpoint: ../model " in (here / "deep" / "p.yaml").read_text()


def test_settings_fill_it_in(cli: Cli, here: Path) -> None:
    cli("init", "--cluster", "devcluster", "--name", "first")
    path = here / "profile.yaml"
    left = findings(path, "model.hf_checkpoint=model")
    assert len(left) == 1 and "data.prompt_data: is still to be filled in" in left[0]
    assert load(path, "model.hf_checkpoint=model", "data.prompt_data=math.jsonl").spec.name == "first"


def test_other_mistakes_are_told_beside_what_is_open(cli: Cli, here: Path) -> None:
    cli("init")
    told = findings(here / "profile.yaml", "num_rollout=x", "name=first")
    assert len(told) == len(OPEN)
    assert any('num_rollout: "x" is not a whole number' in line for line in told)


def test_nothing_is_overwritten(cli: Cli, here: Path) -> None:
    (here / "profile.yaml").write_text("mine\n")
    code, out, err = cli("init")
    assert (code, out) == (2, "") and "profile.yaml is there already, and was left as it is" in err
    assert (here / "profile.yaml").read_text() == "mine\n"
    code, _, err = cli("init", here)
    assert code == 2 and f"name a file in it, such as {here}/profile.yaml" in err


def test_an_unknown_cluster_is_refused_before_anything_is_written(cli: Cli, here: Path) -> None:
    code, _, err = cli("init", "--cluster", "devclustr")
    assert code == 2 and "no cluster profile is named 'devclustr'; did you mean 'devcluster'?" in err
    assert not (here / "profile.yaml").exists()


@pytest.mark.parametrize(
    "text", ["with space", "a: b", "50", "no # comment", "x  # y", "'quoted'", '"', "{x}", "- a", "é"]
)
def test_any_text_survives(text: str) -> None:
    tree = parse_yaml(profile_template(name=text, model=text, data=text), "p")
    assert tree.get(("name",)) == tree.get(("model", "hf_checkpoint")) == tree.get(("data", "prompt_data")) == text
    assert tree.get(("run_dir",)) == f"runs/{text}"
    assert tree.get(("reward", "rm_type")) == "math"


def test_comments_stand_below_each_other() -> None:
    text = profile_template(name="first", cluster="devcluster", model="model", data="math.jsonl")
    columns = {line.rindex(" # ") for line in text.splitlines()[1:] if " # " in line and "<fill in" not in line}
    assert columns == {39}
    assert max(map(len, text.splitlines())) <= 120
