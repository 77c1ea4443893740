"""Compiled ops for PyTorch and optimizers made of them; nothing is loaded before it is used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.ops import adam_step_, adam_step_ref_
    from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

__version__ = "0.1.0"

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "__version__", "adam_step_", "adam_step_ref_"]

_HOMES = {
    "DeepSpeedCPUAdam": "deepspeed_ext.optim",
    "FusedAdam": "deepspeed_ext.optim",
    "adam_step_": "deepspeed_ext.ops",
    "adam_step_ref_": "deepspeed_ext.ops",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
