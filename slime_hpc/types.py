"""The vocabulary siblings share: frozen values and the protocols they meet through."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class Role(enum.StrEnum):
    """What a node or process is for."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    DRIVER = "driver"


@dataclass(frozen=True, order=True)
class JobId:
    """A Slurm job id: the leader's for a heterogeneous job.

    ``component`` is set only where one component is meant (``12+1``); ``cluster`` where sbatch
    named one (multi-cluster submission).
    """

    number: int
    component: int | None = None
    cluster: str | None = field(default=None, compare=False)

    _TEXT = re.compile(r"(?P<number>\d+)(?:\+(?P<component>\d+))?(?:;(?P<cluster>\S+))?")

    @classmethod
    def parse(cls, text: str) -> JobId:
        """From ``12``, ``12+1`` or ``12;cluster``; ValueError on anything else."""
        match = cls._TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a Slurm job id (expected 12, 12+1 or 12;cluster)")
        component = match["component"]
        return cls(int(match["number"]), None if component is None else int(component), match["cluster"])

    @property
    def leader(self) -> JobId:
        """The id that requeue and cancel take."""
        return JobId(self.number, None, self.cluster)

    def __str__(self) -> str:
        return str(self.number) if self.component is None else f"{self.number}+{self.component}"


_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """A Slurm job state, by its full name; one Slurm invents tomorrow is kept as it is."""

    name: str

    @classmethod
    def parse(cls, text: str) -> JobState:
        """From sacct's or squeue's spelling: ``CANCELLED by 1000``, ``CANCELLED+`` and ``OUT_OF_ME+`` too."""
        word = (text.split() or [""])[0].upper()
        stem = word.rstrip("+")
        known = sorted(_PENDING | _RUNNING | _OVER)
        if stem in known or not word.endswith("+"):
            return cls(stem)
        completions = [name for name in known if stem and name.startswith(stem)]
        return cls(completions[0] if len(completions) == 1 else stem)

    @property
    def is_pending(self) -> bool:
        return self.name in _PENDING

    @property
    def is_running(self) -> bool:
        return self.name in _RUNNING

    @property
    def is_over(self) -> bool:
        """True only for states known to be final: an unknown one is not assumed dead."""
        return self.name in _OVER

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, order=True)
class WeightVersion:
    """Which weights an engine serves: the attempt that published them and its running number.

    An engine reports it as ``str(version)``; ``number`` alone is the user's "weight version".
    """

    attempt: int
    number: int

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """From ``a3.v12``; ValueError on anything else, such as SGLang's ``default``."""
        match = re.fullmatch(r"a(\d+)\.v(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a weight version of ours (expected a3.v12)")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"a{self.attempt}.v{self.number}"


class SampleStatus(enum.StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One completion of one prompt, with slime's field names.

    ``tokens`` is prompt + response; ``loss_mask``, ``rollout_log_probs`` have ``response_length``
    entries. Hooks may change ``reward`` and ``metadata``.
    """

    group_index: int
    index: int
    prompt: str
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_version: WeightVersion | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def response_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.response_length :]


Groups = list[list[Sample]]
"""One round's samples: a list a prompt."""


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype (``float32``, ``bfloat16``, …) and shape of one HF-named tensor about to be broadcast."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardReport:
    """What a rank says it wrote: file name relative to the checkpoint, bytes, xxh3-128 hex digest."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class LoadedState:
    """What a trainer rank found in a checkpoint: the step it goes on from, and what became of its random numbers."""

    step: int
    rng: Literal["restored", "reseeded"]
    """Restored where as many ranks in the same layout saved it, else drawn anew from the seed and the step."""


@dataclass(frozen=True)
class TrainBatch:
    """One optimizer step's samples as plain lists, so that it crosses process borders cheaply.

    ``tokens[i]`` is prompt + response of sample i; the per-token lists cover its response only.
    ``advantages`` holds one scalar per sample.
    """

    tokens: Sequence[Sequence[int]]
    response_lengths: Sequence[int]
    loss_masks: Sequence[Sequence[int]]
    rollout_log_probs: Sequence[Sequence[float]]
    advantages: Sequence[float]


class WeightReceiver(Protocol):
    """An engine, as weight sync sees it (implemented by ``rollout.client.EngineClient``)."""

    url: str

    async def init_weights_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None: ...

    async def pause_generation(self) -> None: ...

    async def begin_weight_update(self) -> None: ...

    async def receive_weights(
        self, tensors: Sequence[TensorMeta], *, group_name: str, version: WeightVersion | None
    ) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def weight_version(self) -> str: ...

    async def weights_checksum(self) -> str:
        """Of all weights it would generate with; equal for equal weights in the same layout."""

    async def continue_generation(self) -> None: ...

    async def abandon_weight_update(self, group_name: str) -> None: ...
