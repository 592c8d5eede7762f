"""Tensors → what an engine receives at once, since it makes room for all of a request before it loads any."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from slime_hpc.types import TensorMeta


def buckets(tensors: Iterable[TensorMeta], max_bytes: int) -> Iterator[list[TensorMeta]]:
    """The tensors in their order, in runs of at most ``max_bytes``; a larger tensor is one of its own."""
    bucket: list[TensorMeta] = []
    size = 0
    for tensor in tensors:
        if bucket and size + num_bytes(tensor) > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes(tensor)
    if bucket:
        yield bucket


def num_bytes(tensor: TensorMeta) -> int:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype.itemsize * math.prod(tensor.shape)
