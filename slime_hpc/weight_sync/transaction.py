"""One weight version reaches all engines or is not published."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slime_hpc.errors import ClusterError
from slime_hpc.types import TensorMeta, WeightReceiver, WeightVersion

T = TypeVar("T")


class WeightSyncError(ClusterError):
    """A version was not published. Names the phase and the parties that failed or did not answer.

    No engine may serve after this: some may hold mixed weights, and some may still be waiting for
    the trainer until its side of the group is closed (``WeightSender.close``).
    """

    @property
    def is_shared(self) -> bool:
        """True where all wait for each other, so that those who failed may be another's victims."""
        return self.phase in ("connect", "transfer")

    def __init__(self, phase: str, who: Sequence[str], problem: str) -> None:
        self.phase = phase
        self.who = tuple(who)
        super().__init__(f"weight sync failed in phase {phase!r} at {', '.join(who)}: {problem}")


def group_name(attempt: int, membership: int) -> str:
    """Of the group of one attempt's trainer and engines; ``membership`` grows whenever they change."""
    return f"a{attempt}.g{membership}"


async def connect(
    receivers: Sequence[WeightReceiver],
    join: Callable[[int], Awaitable[None]],
    *,
    host: str,
    port: int,
    ranks_per_engine: int,
    group_name: str,
    backend: str,
    deadline_s: float,
) -> None:
    """Form the group: trainer rank 0, then every engine's ranks in order. Leaves the engines paused.

    They are paused first because all must be there: one that is missing leaves the others waiting.
    ``join(world_size)`` has the trainer join as rank 0 (``WeightSender.join``), listening at host:port.
    """
    world_size = 1 + ranks_per_engine * len(receivers)
    offsets = {r.url: 1 + ranks_per_engine * i for i, r in enumerate(receivers)}

    def enter(receiver: WeightReceiver) -> Awaitable[None]:
        return receiver.init_weights_group(
            host=host,
            port=port,
            rank_offset=offsets[receiver.url],
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    await _all("pause", {r.url: r.pause_generation() for r in receivers}, deadline_s)
    steps = {"the trainer": join(world_size), **{r.url: enter(r) for r in receivers}}
    await _all("connect", steps, deadline_s)


async def publish(
    receivers: Sequence[WeightReceiver],
    broadcast: Callable[[], Awaitable[None]],
    buckets: Sequence[Sequence[TensorMeta]],
    *,
    version: WeightVersion,
    group_name: str,
    deadline_s: float,
) -> None:
    """Have every engine serve ``version``, and only then let any of them generate again.

    ``broadcast()`` has the trainer send all tensors of all buckets in this order (``WeightSender.broadcast``);
    an engine receives a bucket at a time.
    Nothing is sent before every engine has answered twice, the second time from its schedulers: one
    dead member of the group would leave the others waiting. ``receive_weights`` flushes the caches. Several
    engines must hold equal weights, by checksum, before any goes on.
    ``deadline_s`` bounds each phase. WeightSyncError on any failure.
    """

    async def each(phase: str, step: Callable[[WeightReceiver], Awaitable[None]]) -> None:
        await _all(phase, {r.url: step(r) for r in receivers}, deadline_s)

    await each("pause", lambda r: r.pause_generation())
    await each("begin", lambda r: r.begin_weight_update())
    receiving = {r.url: _receive(r, buckets, group_name, version) for r in receivers}
    await _all("transfer", {"the trainer": broadcast(), **receiving}, deadline_s)
    await each("end", lambda r: r.end_weight_update())
    await each("acknowledge", lambda r: _require_version(r, version))
    if len(receivers) > 1:
        await _require_equal_weights(receivers, deadline_s)
    await each("continue", lambda r: r.continue_generation())


async def _receive(
    receiver: WeightReceiver, buckets: Sequence[Sequence[TensorMeta]], group_name: str, version: WeightVersion
) -> None:
    """The version comes with the last bucket: before it, the engine's weights are of no version."""
    for number, bucket in enumerate(buckets, start=1):
        last = version if number == len(buckets) else None
        await receiver.receive_weights(bucket, group_name=group_name, version=last)


async def _require_version(receiver: WeightReceiver, version: WeightVersion) -> None:
    serving = await receiver.weight_version()
    if serving != str(version):
        raise ClusterError(f"it serves version {serving!r}, not {str(version)!r}")


async def _require_equal_weights(receivers: Sequence[WeightReceiver], deadline_s: float) -> None:
    """WeightSyncError naming those whose weights are not what most have; all of them where there is no majority."""
    checksums = await _all("checksum", {r.url: r.weights_checksum() for r in receivers}, deadline_s)
    counts = Counter(checksums.values()).most_common()
    if len(counts) == 1:
        return
    right = counts[0][0] if counts[0][1] > counts[1][1] else None
    odd = [url for url, checksum in checksums.items() if checksum != right]
    raise WeightSyncError("checksum", odd, f"the engines hold different weights of one version: {checksums}")


async def _all(phase: str, steps: dict[str, Awaitable[T]], deadline_s: float) -> dict[str, T]:
    """Results of one phase's steps, run at once. The first failure, or the deadline, ends it and cancels the rest."""
    tasks = {asyncio.ensure_future(step): who for who, step in steps.items()}
    done, pending = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    failed = {tasks[task]: error for task in done if (error := task.exception()) is not None}
    if failed:
        raise WeightSyncError(phase, list(failed), "; ".join(map(str, failed.values())))
    if pending:
        raise WeightSyncError(phase, [tasks[t] for t in pending], f"no answer within {deadline_s:g} s")
    return {who: task.result() for task, who in tasks.items()}
