"""Mixture of experts: layers of many experts, of which each token goes to a few.

- stacks: parameters of many experts in one. expert_forms: experts that are run all at once.
  experts: Experts, many copies of one module. exchange: rows on their way to other processes.
- arguments, sending: what layers have in common. layer: MoE, DeepSpeed's. moe_module: MoeModule,
  Colossal-AI's. older_names: DeepSpeed's state dicts. optimizer_groups: parameters as they are.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.moe.experts import Experts
    from deepspeed_ext.moe.layer import MoE
    from deepspeed_ext.moe.moe_module import MoeModule
    from deepspeed_ext.moe.optimizer_groups import (
        split_params_into_different_moe_groups_for_optimizer,
    )

__all__ = [
    "Experts",
    "MoE",
    "MoeModule",
    "split_params_into_different_moe_groups_for_optimizer",
]

_HOMES = {
    "Experts": "experts",
    "MoE": "layer",
    "MoeModule": "moe_module",
    "split_params_into_different_moe_groups_for_optimizer": "optimizer_groups",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
