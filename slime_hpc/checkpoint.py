"""Checkpoints of a run: commit, find, verify, set aside, prune. One is complete once its manifest is there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import ValidationError

from slime_hpc import __version__
from slime_hpc.errors import ClusterError
from slime_hpc.records import EventLog, fsync_dir, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.run import RunSpec
from slime_hpc.spec.values import Strict
from slime_hpc.types import ShardReport

MANIFEST = "manifest.json"
PRUNED = ".pruned"
"""Ending of a checkpoint that is being deleted, so that half of one is never taken for a crash's."""
DAMAGED = ".damaged"
"""Ending of one that was complete, and is not any more what was written."""
_CHUNK_BYTES = 1 << 22
_NAME = re.compile(r"round_(?P<round>\d{8,})\.a(?P<attempt>\d{4,})")


class Manifest(Strict):
    """What a checkpoint holds, and of what moment of the run. Written last."""

    schema_version: Literal[1] = 1
    tool_version: str = __version__
    attempt: int
    round: int
    """The round after whose training the state was saved; a resume starts with the next."""
    step: int
    """Optimizer updates so far."""
    weight_version: str
    """``str(WeightVersion)`` that was last published."""
    data: dict[str, Any]
    """Cursor of the prompts drawn up to and including this round."""
    spec_fingerprint: str
    shards: tuple[ShardReport, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def fingerprint(spec: RunSpec) -> str:
    """Equal for equal specs; xxh3-128 of their JSON."""
    return xxhash.xxh3_128_hexdigest(spec.model_dump_json().encode())


def commit(run: RunDir, manifest: Manifest) -> Checkpoint:
    """Make what the ranks wrote for ``manifest.round`` a checkpoint, from their reports.

    ClusterError if a newer attempt owns the run by now, or a reported file is not there.
    """
    path = run.checkpoint(manifest.round, manifest.attempt)
    damage = list(_wrong_sizes(path, manifest))
    if damage:
        raise ClusterError(f"checkpoint {path} is not what the ranks reported: {'; '.join(damage)}; not committed")
    require_newest_attempt(run, manifest.attempt)
    write_json(path / MANIFEST, manifest.model_dump(mode="json"))
    fsync_dir(path.parent)
    return Checkpoint(path, manifest)


def require_newest_attempt(run: RunDir, attempt: int) -> None:
    """ClusterError in an attempt that a later one has taken the run over from."""
    newest = max((a.number for a in run.all_attempts()), default=attempt)
    if newest != attempt:
        raise ClusterError(
            f"attempt {attempt} no longer owns {run.path}: attempt {newest} has started; only the newest may go on, so"
            " this one must end (`slime-hpc status` shows both)"
        )


def may_begin_anew(run: RunDir, trained: Sequence[object], interval: int | None) -> bool:
    """Whether a run that has no checkpoint loses, with these rounds, no more than it may between two of them."""
    if any(run.checkpoints.glob(f"*{DAMAGED}")):
        return False
    return not trained or (interval is not None and len(trained) <= interval)


def complete_checkpoints(run: RunDir) -> list[Checkpoint]:
    """Oldest first. A later attempt's come after an earlier one's, whatever their rounds: it is what the run became.

    Files are looked at, not read: ``verify`` does that.
    """
    if not run.checkpoints.is_dir():
        return []
    named = [(match, p) for p in run.checkpoints.iterdir() if p.is_dir() and (match := _NAME.fullmatch(p.name))]
    by_age = sorted(named, key=lambda item: (int(item[0]["attempt"]), int(item[0]["round"])))
    return [Checkpoint(path, manifest) for _, path in by_age if (manifest := _read_complete(path)) is not None]


def find_newest_complete(run: RunDir) -> Checkpoint | None:
    return next(reversed(complete_checkpoints(run)), None)


def _read_complete(path: Path) -> Manifest | None:
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None  # never committed, or by a version whose manifest means something else: not one to load
    return manifest if not any(_wrong_sizes(path, manifest)) else None


def _wrong_sizes(path: Path, manifest: Manifest) -> Iterator[str]:
    for shard in manifest.shards:
        file = path / shard.name
        if not file.is_file():
            yield f"{shard.name} is missing"
        elif file.stat().st_size != shard.size:
            yield f"{shard.name} has {file.stat().st_size} bytes, not {shard.size}"


def verify(checkpoint: Checkpoint) -> None:
    """Read every file and compare checksums. ClusterError naming each file that differs from what was written."""
    damage = list(_wrong_sizes(checkpoint.path, checkpoint.manifest)) or [
        f"{shard.name} has another checksum than when it was written"
        for shard in checkpoint.manifest.shards
        if _checksum(checkpoint.path / shard.name) != shard.checksum
    ]
    if damage:
        raise ClusterError(
            f"checkpoint {checkpoint.path} is damaged: {'; '.join(damage)}; move it away to use an older one"
        )


def newest_sound(run: RunDir, log: EventLog) -> Checkpoint | None:
    """The newest checkpoint whose every byte is what was written; None where there is none.

    What is torn or damaged is renamed and logged on the way: kept as evidence, never loaded.
    """
    for path in _torn(run):
        _set_aside(path, ".torn", "it has no manifest that fits its files: its writer was killed", log)
    for checkpoint in reversed(complete_checkpoints(run)):
        try:
            verify(checkpoint)
        except ClusterError as error:  # an older one is as good a place to go on from, and the log says why
            _set_aside(checkpoint.path, DAMAGED, str(error), log)
        else:
            return checkpoint
    return None


def _torn(run: RunDir) -> list[Path]:
    complete = {checkpoint.path for checkpoint in complete_checkpoints(run)}
    found = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    return sorted(path for path in found if path.is_dir() and _NAME.fullmatch(path.name) and path not in complete)


def _set_aside(path: Path, ending: str, reason: str, log: EventLog) -> None:
    aside = path.with_name(path.name + ending)
    path.rename(aside)
    log("checkpoint_set_aside", path=str(aside), reason=reason)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def prune(run: RunDir, keep: int) -> list[Path]:
    """Delete complete checkpoints but the newest ``keep``; returns what they were called.

    Incomplete ones stay: they are evidence of a crash, and not ours to judge.
    """
    assert keep >= 1, "the newest checkpoint is never deleted"
    surplus = [checkpoint.path for checkpoint in complete_checkpoints(run)[:-keep]]
    for path in surplus:
        path.rename(path.with_name(path.name + PRUNED))
    for path in run.checkpoints.glob(f"*{PRUNED}"):
        shutil.rmtree(path)
    return surplus
