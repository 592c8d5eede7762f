"""Which checkpoint is exported, and where to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_hpc.checkpoint import Manifest, commit
from slime_hpc.driver.export import choose, main, require_ours
from slime_hpc.errors import UserError
from slime_hpc.records import write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.trainer import ranks
from slime_hpc.trainer.ranks import write_hf_model


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Round 4 was trained by attempt 1, and again by attempt 2."""
    run = RunDir(tmp_path / "run")
    for round_, attempt in ((2, 1), (4, 1), (4, 2)):
        run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
        run.checkpoint(round_, attempt).mkdir(parents=True)
        version = f"a{attempt}.v{round_}"
        manifest = Manifest(
            attempt=attempt, round=round_, step=5, weight_version=version, data={}, spec_fingerprint="", shards=()
        )
        commit(run, manifest)
    run.checkpoint(6, 2).mkdir()  # without a manifest: none
    return run


def test_the_newest_of_all_or_of_a_round(run: RunDir) -> None:
    assert choose(run, None).path == choose(run, 4).path == run.checkpoint(4, 2)
    assert choose(run, 2).path == run.checkpoint(2, 1)
    for missing in (3, 6):
        with pytest.raises(UserError, match=rf"no complete checkpoint of round {missing} in .*; of rounds: 2, 4$"):
            choose(run, missing)


def test_a_run_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        choose(RunDir(tmp_path), None)
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: {tmp_path} has no complete checkpoint yet")


def test_only_a_free_place_or_an_earlier_export_is_written_over(tmp_path: Path) -> None:
    require_ours(tmp_path / "new", "mark")
    require_ours(tmp_path, "mark")
    (tmp_path / "thesis.tex").touch()
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UserError, match="is there already, and no export of slime-hpc; choose another -o"):
            require_ours(path, "mark")
    (tmp_path / "mark").touch()
    require_ours(tmp_path, "mark")


def test_a_place_that_cannot_be_written_is_an_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/model.safetensors")

    monkeypatch.setattr("slime_hpc.driver.export.export", full)
    assert main([str(run.path)]) == 1
    assert capsys.readouterr().err == "error: /scratch/model.safetensors: No space left on device\n"


def test_of_two_exports_at_once_a_whole_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_json(source / "config.json", {"model_type": "qwen3"})
    swap = ranks._put_in_place

    def interrupted(new: Path, directory: Path, old: Path) -> None:
        monkeypatch.setattr(ranks, "_put_in_place", swap)
        write_hf_model(directory, source, {"w": torch.full((4,), 2.0)})
        swap(new, directory, old)

    monkeypatch.setattr(ranks, "_put_in_place", interrupted)
    write_hf_model(tmp_path / "model", source, {"w": torch.full((4,), 1.0)})
    assert load_file(tmp_path / "model" / "model.safetensors")["w"].tolist() == [1.0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]
