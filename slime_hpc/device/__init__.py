"""What differs between CUDA and a CPU: the only package that asks which it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from slime_hpc.errors import UserError

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """One kind of hardware, as trainer, engine and weight sync need to know it."""

    backend: str
    """torch.distributed backend: ``nccl`` or ``gloo``."""

    def torch_dtype(self) -> torch.dtype:
        """Dtype trainer and engine compute in."""

    def network_env(self, interface: str) -> dict[str, str]:
        """Environment variables that keep the backend on one network interface; read when a group is formed."""

    def prepare_trainer(self) -> None:
        """Make megatron-core usable in this process; called before anything imports it."""

    def sglang_args(self) -> dict[str, object]:
        """SGLang server arguments this hardware needs, by ServerArgs field name."""

    def sglang_env(self) -> dict[str, str]:
        """Environment variables of the server process; PYTHONPATH is to be prepended to, not replaced."""


def get_device(kind: Literal["cuda", "cpu"]) -> Device:
    """The hardware a cluster profile names. UserError for one this version has not run on."""
    if kind == "cpu":
        from slime_hpc.device.cpu import CpuDevice

        return CpuDevice()
    raise UserError("device: cuda has not run in this version; use a cluster profile with `device: cpu`, as devcluster")
