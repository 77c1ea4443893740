"""Inference: what generating tokens takes beside the ops."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.inference.kv_cache import KVCache

__all__ = ["KVCache"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("deepspeed_ext.inference.kv_cache"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
