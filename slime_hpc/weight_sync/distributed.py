"""The trainer's side of a weight group: a torch.distributed group beside the trainer's own."""

from __future__ import annotations

import gc
import socket
from collections import deque
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from slime_hpc.errors import ClusterError

MAX_IN_FLIGHT = 8
"""Tensors being sent at once; each keeps its gathered copy."""


class WeightSender:
    """Rank 0 of a group whose other ranks are engines.

    Made in two steps, because the engines must be told the port before the group can form: the
    constructor listens on a free port of ``host``, and no other process can take it from then on;
    ``join`` waits for the engines. Needs no default process group and touches none.
    """

    def __init__(self, host: str, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        self._store: Store | None = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: dist.ProcessGroup | None = None

    def join(self, *, world_size: int, group_name: str, backend: str) -> None:
        """Wait for the engines, ranks 1 to ``world_size`` - 1; RuntimeError after the timeout.

        Forms the group as SGLang's ``init_custom_process_group`` does on the other side.
        """
        if self._store is None:
            raise RuntimeError("join after close; make a new WeightSender, on a new port")
        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            PrefixStore(group_name, self._store),
            group_name=c10d.GroupName(group_name),
            timeout=self._timeout,
        )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self._group = group

    def broadcast(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the tensors in order, while the next ones are gathered.

        ClusterError as soon as a member is gone, or after the timeout.
        """
        if self._group is None:
            raise RuntimeError("broadcast without join; torch would take None for the trainer's own group")
        problem = _send(tensors, self._group)
        if problem:
            raise ClusterError(f"sending {problem}")

    def close(self) -> None:
        """Leave the group. Engines still waiting in it get an error instead of waiting forever.

        gloo closes its connections only when the last reference to the group is dropped:
        neither abort nor shutdown nor destroy_process_group alone frees them.
        """
        group, self._group, self._store = self._group, None, None
        if group is not None:
            dist.destroy_process_group(group)
        del group
        gc.collect()


def _send(tensors: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> str:
    """What failed, or nothing. As text: an error's frames hold the group, so that ``close`` could not free it."""
    in_flight: deque[tuple[str, dist.Work]] = deque()
    oldest = "the first weights"
    try:
        for name, tensor in tensors:
            if len(in_flight) == MAX_IN_FLIGHT:
                oldest, work = in_flight.popleft()
                work.wait()
            begun = dist.broadcast(tensor.detach().contiguous(), group=group, group_src=0, async_op=True)
            assert begun is not None
            in_flight.append((name, begun))
        while in_flight:
            oldest, work = in_flight.popleft()
            work.wait()
    except RuntimeError as error:
        return f"{oldest} to the engines failed: {error}"
    return ""
