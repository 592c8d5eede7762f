"""Which checkpoints count, and which are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from slime_hpc.checkpoint import (
    MANIFEST,
    Manifest,
    commit,
    complete_checkpoints,
    find_newest_complete,
    fingerprint,
    prune,
    verify,
)
from slime_hpc.errors import ClusterError
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.run import RunSpec
from slime_hpc.types import ShardReport

CONTENT = b"weights" * 1000


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.attempt(1).path.mkdir(parents=True)
    return run


def write_shards(run: RunDir, round_: int, attempt: int = 1) -> Manifest:
    """What a save leaves before the commit, and the manifest to commit it with."""
    path = run.checkpoint(round_, attempt)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(CONTENT)
    return Manifest(
        attempt=attempt,
        round=round_,
        step=round_ + 1,
        weight_version=f"a{attempt}.v{round_}",
        data={"drawn": 4 * round_},
        spec_fingerprint="f",
        shards=(ShardReport("__0_0.distcp", len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT)),),
    )


def save(run: RunDir, round_: int, attempt: int = 1) -> None:
    commit(run, write_shards(run, round_, attempt))


def test_committed_checkpoint_is_found_with_all_that_it_binds(run: RunDir) -> None:
    manifest = write_shards(run, 3)
    commit(run, manifest)
    found = find_newest_complete(run)
    assert found is not None
    assert found.path == run.checkpoint(3, 1)
    assert found.manifest == manifest
    verify(found)


def test_a_run_without_checkpoints_has_none(run: RunDir) -> None:
    assert find_newest_complete(run) is None


def test_uncommitted_checkpoint_is_not_chosen(run: RunDir) -> None:
    save(run, 3)
    write_shards(run, 4)
    found = find_newest_complete(run)
    assert found is not None and found.manifest.round == 3


@pytest.mark.parametrize("harm", ["missing", "truncated", "manifest"])
def test_incomplete_checkpoint_is_not_chosen(run: RunDir, harm: str) -> None:
    save(run, 3)
    save(run, 4)
    shard = run.checkpoint(4, 1) / "__0_0.distcp"
    if harm == "missing":
        shard.unlink()
    elif harm == "truncated":
        shard.write_bytes(CONTENT[:-1])
    else:
        (run.checkpoint(4, 1) / MANIFEST).write_text("{")
    found = find_newest_complete(run)
    assert found is not None and found.manifest.round == 3


def test_manifest_of_an_unknown_schema_is_not_chosen(run: RunDir) -> None:
    save(run, 3)
    path = run.checkpoint(3, 1) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 2}))
    assert find_newest_complete(run) is None


def test_commit_refuses_a_file_that_is_not_what_was_reported(run: RunDir) -> None:
    manifest = write_shards(run, 3)
    (run.checkpoint(3, 1) / "__0_0.distcp").unlink()
    with pytest.raises(ClusterError, match=r"__0_0\.distcp is missing"):
        commit(run, manifest)
    assert not (run.checkpoint(3, 1) / MANIFEST).exists()


def test_a_stale_owner_may_not_commit(run: RunDir) -> None:
    manifest = write_shards(run, 3)
    run.attempt(2).path.mkdir()
    with pytest.raises(ClusterError, match=r"attempt 1 no longer owns .*attempt 2"):
        commit(run, manifest)
    assert find_newest_complete(run) is None


def test_the_later_attempt_is_newer_even_at_an_earlier_round(run: RunDir) -> None:
    save(run, 20, attempt=1)
    run.attempt(2).path.mkdir()
    save(run, 15, attempt=2)
    assert [c.manifest.round for c in complete_checkpoints(run)] == [20, 15]


def test_verify_finds_a_flipped_bit(run: RunDir) -> None:
    save(run, 3)
    shard = run.checkpoint(3, 1) / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)
    found = find_newest_complete(run)
    assert found is not None, "of the right size"
    with pytest.raises(ClusterError, match=r"__0_0\.distcp has another checksum"):
        verify(found)


def test_prune_keeps_the_newest_and_what_is_incomplete(run: RunDir) -> None:
    write_shards(run, 0)
    for round_ in (1, 2, 3, 4):
        save(run, round_)
    assert prune(run, keep=2) == [run.checkpoint(1, 1), run.checkpoint(2, 1)]
    assert sorted(p.name for p in run.checkpoints.iterdir()) == [run.checkpoint(r, 1).name for r in (0, 3, 4)]


def test_prune_finishes_a_deletion_that_was_cut_short(run: RunDir) -> None:
    save(run, 1)
    half = run.checkpoints / "round_00000000.a0001.pruned"
    half.mkdir()
    assert prune(run, keep=1) == []
    assert not half.exists()
    assert [c.manifest.round for c in complete_checkpoints(run)] == [1]


def test_fingerprint_tells_specs_apart(tmp_path: Path) -> None:
    def spec(lr: float) -> RunSpec:
        return RunSpec.model_validate(
            {
                "name": "x",
                "cluster": "c",
                "run_dir": tmp_path,
                "time_limit": 10,
                "num_rollout": 1,
                "model": {"hf_checkpoint": tmp_path},
                "trainer": {"partition": "t"},
                "rollout": {"partition": "r"},
                "data": {"prompt_data": tmp_path},
                "sampling": {"rollout_batch_size": 1, "rollout_max_response_len": 1},
                "reward": {"custom_rm_path": "m.f"},
                "algorithm": {"lr": lr},
            }
        )

    assert fingerprint(spec(1e-6)) == fingerprint(spec(1e-6))
    assert fingerprint(spec(1e-6)) != fingerprint(spec(2e-6))
