"""A machine without GPUs: gloo and float32. For trying things out and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_hpc.device import cpu_sglang

if TYPE_CHECKING:
    import torch


class CpuDevice:
    """The host's own cores."""

    backend = "gloo"

    def torch_dtype(self) -> torch.dtype:
        """float32: trainer and engine then agree on a log-prob to 1e-5, in bfloat16 only to 3e-3."""
        import torch

        return torch.float32

    def network_env(self, interface: str) -> dict[str, str]:
        """gloo would take the interface that the host name resolves to, often the loopback."""
        return {"GLOO_SOCKET_IFNAME": interface}

    def prepare_trainer(self) -> None:
        from slime_hpc.device.cpu_megatron import redirect_cuda

        redirect_cuda()

    def sglang_args(self) -> dict[str, object]:
        return cpu_sglang.sglang_args()

    def sglang_env(self) -> dict[str, str]:
        return cpu_sglang.sglang_env()
