"""Random-LTD into the layers of a model, and out of the names of its state."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed_ext.random_ltd.layer import RandomLayerTokenDrop
from deepspeed_ext.torch_internals.modules import modules_of

_INSIDE = "random_ltd_layer"


def convert_to_random_ltd(
    model: nn.Module, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]
) -> nn.Module:
    """Put RandomLayerTokenDrop around all modules of a class, in place, and return the model.

    Nothing is dropped until an engine of a config with random_ltd has it, or `init_config`.

    Args:
        model: of any kind, before initialize; what is its `module` is changed if it has one.
        convert_type: the class of layers, or several.

    Raises:
        TypeError: convert_type is no class.
        ValueError: the model is of that class itself, or has no such module.
    """
    kinds = convert_type if isinstance(convert_type, tuple) else (convert_type,)
    if not kinds or not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(
            f"convert_to_random_ltd: convert_type is {convert_type!r}, expected a class of modules,"
            " or several in a tuple"
        )
    inner = getattr(model, "module", model)
    if isinstance(inner, convert_type):
        raise ValueError(
            f"convert_to_random_ltd: model is a {type(inner).__name__}, expected a model that has"
            " such layers"
        )
    made: dict[nn.Module, RandomLayerTokenDrop] = {}
    _convert(inner, convert_type, made)
    if not made:
        raise ValueError(
            f"convert_to_random_ltd: convert_type is {convert_type}, expected a class of modules of"
            " the model that are not converted"
        )
    return model


def _convert(module: nn.Module, kind: Any, made: dict[nn.Module, RandomLayerTokenDrop]) -> None:
    if isinstance(module, RandomLayerTokenDrop):
        return
    for child in [*module.children()]:
        if isinstance(child, kind) and not isinstance(child, RandomLayerTokenDrop):
            if child not in made:
                made[child] = RandomLayerTokenDrop(child).train(child.training)
        else:
            _convert(child, kind, made)
    parts = modules_of(module)
    for name, found in [*parts.items()]:  # also a layer that has two names
        if found is not None and found in made:
            parts[name] = made[found]


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the state of a converted model under the names that it had before.

    Args:
        model: as ``convert_to_random_ltd`` returned it; its `module` if it has one.
    """
    inner = getattr(model, "module", model)
    return remove_random_ltd_state_dict(inner.state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without what `convert_to_random_ltd` has put into the names."""
    return {
        ".".join(part for part in name.split(".") if part != _INSIDE): value
        for name, value in state_dict.items()
    }
