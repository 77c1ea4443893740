"""Mixture of experts in models.

- transformers_models: experts of transformers' models, computed with our ops.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.moe.transformers_models import register_with_transformers

__all__ = ["register_with_transformers"]

_HOMES = {"register_with_transformers": "transformers_models"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
