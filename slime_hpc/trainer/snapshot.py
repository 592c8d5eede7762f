"""``python -m slime_hpc.trainer.snapshot``: write down which fields the installed megatron-core's configs have."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import typing
from datetime import UTC, datetime
from typing import Any, Literal

from slime_hpc.device import get_device
from slime_hpc.spec.passthrough.arguments import Argument, Snapshot, snapshot_path, type_names

PACKAGE = "megatron-core"


def config_classes() -> tuple[type, ...]:
    """Those whose fields a profile may name; TransformerConfig is a ModelParallelConfig."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig, OptimizerConfig, DistributedDataParallelConfig


def take_snapshot() -> Snapshot:
    """Every public field, with the flags that Megatron-LM gives it as far as the field says so."""
    found: dict[str, Argument] = {}
    for config in config_classes():
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if not field.name.startswith("_"):
                found.setdefault(field.name, _argument(field, hints[field.name]))
    return Snapshot(
        package=PACKAGE,
        version=importlib.metadata.version(PACKAGE),
        date=datetime.now(UTC).date().isoformat(),
        arguments=tuple(sorted(found.values(), key=lambda argument: argument.name)),
    )


def _argument(field: dataclasses.Field[Any], hint: Any) -> Argument:
    named = tuple(field.metadata.get("argparse_meta", {}).get("arg_names", ()))
    clears = field.default is True  # Megatron-LM then has a flag that clears it, such as --disable-bias-linear
    own = f"--{field.name.replace('_', '-')}"
    return Argument(
        name=field.name,
        types=type_names(hint),
        flags=(own,) if clears else (*named, own),
        off_flags=(*named, f"--no-{field.name.replace('_', '-')}") if clears else (),
        choices=_choices(hint),
    )


def _choices(hint: Any) -> tuple[Any, ...]:
    for alternative in (hint, *typing.get_args(hint)):
        if typing.get_origin(alternative) is Literal:
            return typing.get_args(alternative)
        if isinstance(alternative, enum.EnumMeta):
            return tuple(alternative.__members__)
    return ()


if __name__ == "__main__":
    get_device("cpu").prepare_trainer()  # else megatron-core cannot be imported without a GPU
    take_snapshot().write(snapshot_path(PACKAGE))
