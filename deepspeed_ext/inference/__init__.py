"""Inference: engines that generate with a model's weights, and what they are made of.

Nothing is compiled or loaded before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.inference.execution.kv_cache import KVCache
    from deepspeed_ext.inference.execution.sampling import SamplingOptions
    from deepspeed_ext.inference.initialize import init_inference
    from deepspeed_ext.inference.model.policy import (
        ExpertNames,
        Experts,
        Key,
        Names,
        Policy,
        Sizes,
        Windows,
    )
    from deepspeed_ext.inference.requests.async_stream import AsyncStream
    from deepspeed_ext.inference.requests.logits import Logits
    from deepspeed_ext.inference.requests.request import Completion, Score
    from deepspeed_ext.inference.requests.stream import Piece, Stream
    from deepspeed_ext.inference.serving.encoder_engine import EncoderEngine
    from deepspeed_ext.inference.serving.engine import InferenceEngine

__all__ = [
    "AsyncStream",
    "Completion",
    "EncoderEngine",
    "ExpertNames",
    "Experts",
    "InferenceEngine",
    "KVCache",
    "Key",
    "Logits",
    "Names",
    "Piece",
    "Policy",
    "SamplingOptions",
    "Score",
    "Sizes",
    "Stream",
    "Windows",
    "init_inference",
]

_HOMES = {
    "AsyncStream": "requests.async_stream",
    **dict.fromkeys(("Completion", "Score"), "requests.request"),
    "EncoderEngine": "serving.encoder_engine",
    "InferenceEngine": "serving.engine",
    "KVCache": "execution.kv_cache",
    "Logits": "requests.logits",
    **dict.fromkeys(
        ("ExpertNames", "Experts", "Key", "Names", "Policy", "Sizes", "Windows"), "model.policy"
    ),
    **dict.fromkeys(("Piece", "Stream"), "requests.stream"),
    "SamplingOptions": "execution.sampling",
    "init_inference": "initialize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deepspeed_ext.inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
