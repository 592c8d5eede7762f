"""How an SGLang server runs on a CPU with the wheels of PyPI, which are built for CUDA."""

from __future__ import annotations

from pathlib import Path

KERNELS = Path(__file__).with_name("cpu_kernels")
"""Directory to put on PYTHONPATH: holds the stand-in ``sgl_kernel``."""


def sglang_args() -> dict[str, object]:
    """Server arguments by ServerArgs field name.

    float32 because the engine's log-probs must equal the trainer's to 1e-5 (bfloat16: 3e-3);
    sleep_on_idle because a waiting scheduler otherwise spins on a core.
    """
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "dtype": "float32",
        "sleep_on_idle": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 16384,
        "max_running_requests": 32,
    }


def sglang_env() -> dict[str, str]:
    """Environment of the server process; PYTHONPATH is to be prepended to what there is."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(KERNELS),
        "THP_MEM_ALLOC_ENABLE": "1",  # weights are received into new memory: in huge pages 0.5 s instead of 0.8
    }
