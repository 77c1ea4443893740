"""Ops of random-LTD: layers that see some tokens only. DeepSpeed's names of them are here too."""

from importlib import import_module

__all__ = ["GatherTokens", "ScatterTokens", "bert_sample_tokens", "gpt_sample_tokens"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.dropping_utils"), name)
