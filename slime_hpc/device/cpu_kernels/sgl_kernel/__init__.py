"""Stand-in for the package ``sgl_kernel``, whose wheel is CUDA code that needs libcuda.so.1 to import.

SGLang imports names from it on the CPU path too, but calls none with the arguments of
``slime_hpc.device.cpu_sglang``. It computes nothing: every name is a function that raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+slime-hpc-cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this stand-in for the CPU has none")

    missing.__name__ = name
    return missing
