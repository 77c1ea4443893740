"""Mixture of experts: layers of many experts, of which each token goes to a few.

- stacks: parameters of many experts in one. expert_forms: experts that are run all at once.
  experts: Experts, many copies of one module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.moe.experts import Experts

__all__ = ["Experts"]

_HOMES = {"Experts": "experts"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
