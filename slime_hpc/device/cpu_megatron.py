"""What megatron-core takes for granted of CUDA, redirected to the CPU.

Nothing of torch itself is changed: only the modules of megatron-core named here see another ``torch``, whose
``torch.cuda`` functions and ``device="cuda"`` arguments mean the CPU.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class _Namespace(ModuleType):
    """A module with some names replaced, all others its own."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


_CUDA = _Namespace(
    torch.cuda,
    current_device=lambda: torch.device("cpu"),
    manual_seed=torch.manual_seed,
    get_rng_state=_get_rng_state,
    random=_Namespace(torch.cuda.random, get_rng_state=_get_rng_state),
)
_TORCH = _Namespace(
    torch, cuda=_CUDA, tensor=_on_cpu(torch.tensor), zeros=_on_cpu(torch.zeros), ones=_on_cpu(torch.ones)
)

_REDIRECTED = (
    "megatron.core.tensor_parallel.random",  # seeds the CUDA generator and swaps its state
    "megatron.core.tensor_parallel.layers",  # weights on current_device()
    "megatron.core.tensor_parallel.mappings",  # gathers into torch.cuda.current_device()
    "megatron.core.utils",  # attention scores in a buffer on current_device()
    "megatron.core.transformer.utils",  # causal mask on device="cuda"
    "megatron.core.models.common.embeddings.rotary_pos_embedding",  # moves frequencies to current_device()
    "megatron.core.distributed.param_and_grad_buffer",  # gradient buffers on current_device()
    "megatron.core.optimizer.optimizer",  # FP32Optimizer's scale on device="cuda"
    "megatron.core.optimizer.distrib_optimizer",  # empty moments on current_device()
    "megatron.core.optimizer.clip_grads",  # norm buffers on device="cuda"
    "megatron.core.rerun_state_machine",  # names the device when it reports a NaN
)


def redirect_cuda() -> None:
    """Make megatron-core usable in this process. Doing it again changes nothing."""
    with _unimportable("flash_mla"):
        modules = {name: importlib.import_module(name) for name in _REDIRECTED}
        importlib.import_module("megatron.core.transformer.attention")  # the one that tries to import flash_mla
    for module in modules.values():
        vars(module)["torch"] = _TORCH
    # It calls private functions of torch's CUDA extension, past any torch.cuda.
    vars(modules["megatron.core.tensor_parallel.random"])["_set_cuda_rng_state"] = _set_rng_state
    # It asserts that every gradient's type is torch.cuda.FloatTensor.
    vars(modules["megatron.core.optimizer.optimizer"])["clip_grad_by_total_norm_fp32"] = _clip_grads
    from slime_hpc.device.cpu_optimizer import CpuDistributedOptimizer

    vars(importlib.import_module("megatron.core.optimizer"))["DistributedOptimizer"] = CpuDistributedOptimizer
    # It warns when a "CUDA" generator in use moves the CPU's: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _clip_grads(
    parameters: Iterable[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Megatron's formula: scale by max_norm / (total_norm + 1e-6) where that is below 1."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(total_norm))


@contextmanager
def _unimportable(name: str) -> Iterator[None]:
    """``import name`` raises ImportError meanwhile.

    flash_mla, which SGLang installs, raises OSError where libcuda is missing; megatron catches only ImportError.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
