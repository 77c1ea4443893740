"""A layer whose linear layers are in one flat buffer, so that they travel by one copy.

Norms and the scores of sinks stay on the device: they are small, and the layer before reads a norm.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from deepspeed_ext.inference.weights.loader import Layer

_TRAVEL = ("qkv", "out", "up", "down", "experts")
_ALIGNMENT = 256  # bytes, as allocators of devices have it


def flat_bytes(layer: Layer) -> int:
    """Return the bytes of the flat buffer of a layer, which may be on meta."""
    end = 0

    def note(tensor: Tensor, begin: int) -> Tensor:
        nonlocal end
        end = begin + tensor.nbytes
        return tensor

    _changed(layer, note)
    return end


def travelling(layer: Layer) -> list[object]:
    """Return the parts of a layer whose tensors travel."""
    return [getattr(layer, name) for name in _TRAVEL]


def without_memory(layer: Layer) -> Layer:
    """Return a layer of which only what stays has values, and the rest shapes and dtypes."""
    return _changed(layer, lambda tensor, _: tensor.to("meta"))


def copied_to(layer: Layer, flat: Tensor) -> Layer:
    """Return a layer of which a flat buffer has a copy; on a GPU it is only queued."""
    return _changed(
        layer, lambda tensor, begin: _at(flat, tensor, begin).copy_(tensor, non_blocking=True)
    )


def view_of(layer: Layer, flat: Tensor) -> Layer:
    """Return a layer whose values are those that a flat buffer has at any time.

    Args:
        layer: says what it is made of, as `without_memory`.
        flat: (bytes,), uint8.
    """
    return _changed(layer, lambda tensor, begin: _at(flat, tensor, begin))


def _at(flat: Tensor, tensor: Tensor, begin: int) -> Tensor:
    return flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _changed(layer: Layer, change: Callable[[Tensor, int], Tensor]) -> Layer:
    """Return a layer with other tensors in the place of those that travel.

    Args:
        change: is given each, in an order that does not change, and where it begins.
    """
    begin = 0

    def one(tensor: Tensor) -> Tensor:
        nonlocal begin
        at, begin = begin, begin + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return change(tensor, at)

    return replace(layer, **{name: _mapped(getattr(layer, name), one) for name in _TRAVEL})


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _mapped(getattr(value, name), change) for name in names})
    return value
