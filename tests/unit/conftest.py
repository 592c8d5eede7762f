"""A profile that passes every check, to make one mistake in at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_hpc.errors import ProfileError
from slime_hpc.spec.load import Profile, load_profile

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    """A copy of the quickstart's profile.yaml, with empty files for its model."""
    directory = tmp_path / "quickstart"
    directory.mkdir()
    for name in ("profile.yaml", "prompts.jsonl", "reward.py"):
        shutil.copy(QUICKSTART / name, directory)
    (directory / "model").mkdir()
    for name in MODEL_FILES:
        (directory / "model" / name).touch()
    return directory / "profile.yaml"


@pytest.fixture
def profile(quickstart: Path, tmp_path: Path) -> Profile:
    return load_profile(quickstart, sets=[f"run_dir={tmp_path / 'run'}"])


@pytest.fixture
def refused(quickstart: Path) -> Callable[..., str]:
    """``refused("trainer.nodes=x")``: what the loader says of the quickstart with these overrides."""

    def load(*sets: str, flags: tuple[str, ...] = ()) -> str:
        with pytest.raises(ProfileError) as error:
            load_profile(quickstart, sets=sets, flags=flags)
        return str(error.value)

    return load
