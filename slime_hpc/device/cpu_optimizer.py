"""megatron-core's distributed optimizer, where Adam is torch's own and on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CpuDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Three places of megatron-core 0.16 that know only fused Adams, whose state has no ``step`` a parameter."""

    @classmethod
    def _build_model_and_main_param_groups(cls, *args: Any) -> Any:
        with _CudaTypeNames():
            return super()._build_model_and_main_param_groups(*args)

    def sharded_state_dict(self, model: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading:
            self._allocate_state()  # else it finds no step, and asserts that there is one
        return super().sharded_state_dict(model, is_loading, *args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            # It is one tensor for all of them, which each would increase in a step.
            state["step"] = state["step"].clone()

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        step = self._get_main_param_and_optimizer_states(model_param)["step"]
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": step})

    def _allocate_state(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if not self.optimizer.state[p]:
                    self.optimizer.state[p] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


class _CudaTypeNames(TorchFunctionMode):
    """Meanwhile the ``type()`` of a CPU tensor reads as that of a CUDA tensor, which is compared with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result
