"""Inference: engines that generate with a model's weights, and what they are made of.

Nothing is compiled or loaded before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.inference.encoder_engine import EncoderEngine
    from deepspeed_ext.inference.engine import InferenceEngine
    from deepspeed_ext.inference.initialize import init_inference
    from deepspeed_ext.inference.kv_cache import KVCache
    from deepspeed_ext.inference.policy import Key, Names, Policy, Sizes, Windows
    from deepspeed_ext.inference.requests import Completion
    from deepspeed_ext.inference.sampling import SamplingOptions
    from deepspeed_ext.inference.stream import Piece, Stream

__all__ = [
    "Completion",
    "EncoderEngine",
    "InferenceEngine",
    "KVCache",
    "Key",
    "Names",
    "Piece",
    "Policy",
    "SamplingOptions",
    "Sizes",
    "Stream",
    "Windows",
    "init_inference",
]

_HOMES = {
    "Completion": "requests",
    "EncoderEngine": "encoder_engine",
    "InferenceEngine": "engine",
    "KVCache": "kv_cache",
    **dict.fromkeys(("Key", "Names", "Policy", "Sizes", "Windows"), "policy"),
    **dict.fromkeys(("Piece", "Stream"), "stream"),
    "SamplingOptions": "sampling",
    "init_inference": "initialize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deepspeed_ext.inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
