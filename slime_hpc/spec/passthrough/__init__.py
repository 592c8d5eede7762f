"""Megatron, SGLang and sbatch arguments that a profile passes through. Nothing accepted is ignored.

A key is applied, held against what decides the matter, or refused with the reason.
"""

from __future__ import annotations

from slime_hpc.spec.passthrough.flags import apply_flags
from slime_hpc.spec.passthrough.keys import check_keys, check_values, set_over, snapshot_warnings
from slime_hpc.spec.passthrough.megatron import MegatronSettings, megatron_settings
from slime_hpc.spec.passthrough.sbatch import SBATCH_OWNED

__all__ = [
    "SBATCH_OWNED",
    "MegatronSettings",
    "apply_flags",
    "check_keys",
    "check_values",
    "megatron_settings",
    "set_over",
    "snapshot_warnings",
]
