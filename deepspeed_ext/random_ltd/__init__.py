"""Random layer-token drop: layers that see some of the tokens while a model is trained.

- scheduler: how many tokens are kept, step by step. layer: RandomLayerTokenDrop, around a layer.
- convert: into and out of the layers of a model.

See: Yao et al., "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for
Large-scale Transformers", 2022.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.random_ltd.convert import (
        convert_to_random_ltd,
        remove_random_ltd_state_dict,
        save_without_random_ltd,
    )
    from deepspeed_ext.random_ltd.layer import RandomLayerTokenDrop
    from deepspeed_ext.random_ltd.scheduler import RandomLTDScheduler

__all__ = [
    "RandomLTDScheduler",
    "RandomLayerTokenDrop",
    "convert_to_random_ltd",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
]

_HOMES = {
    "RandomLTDScheduler": "scheduler",
    "RandomLayerTokenDrop": "layer",
    "convert_to_random_ltd": "convert",
    "remove_random_ltd_state_dict": "convert",
    "save_without_random_ltd": "convert",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
