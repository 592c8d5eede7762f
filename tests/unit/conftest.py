"""A profile that passes every check, to make one mistake in at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_hpc.cli import main
from slime_hpc.errors import ProfileError
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm import commands
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.submit import submit_run
from slime_hpc.testing import FakeSlurm

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


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``cli("plan", path)`` → exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """What the commands get for SlurmCli."""
    fake = FakeSlurm()
    monkeypatch.setattr(commands, "SlurmCli", lambda: fake)
    return fake


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


@pytest.fixture
def run(profile: Profile, slurm: FakeSlurm) -> RunDir:
    submit_run(profile, slurm, supervise)
    return RunDir(profile.spec.run_dir)
