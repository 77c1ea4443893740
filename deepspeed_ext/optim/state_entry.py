"""The state of one parameter, as a dict that tells its optimizer when somebody replaces a value."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def announce(self: "StateEntry", *args: Any, **kwargs: Any) -> Any:
        on_change = self._on_change()
        if on_change is not None:
            on_change()
        return method(self, *args, **kwargs)

    return announce


class StateEntry(dict[str, Any]):
    """A dict that calls `on_change` before a value goes; a copy or a pickle of it is a plain dict.

    An optimizer steps on flat buffers, of which the values here are views. Users do put other
    tensors in their place (to move state between devices, to prune), and comparing every value
    before every step would cost a tenth of a step over small parameters.

    Args:
        values: what the dict holds at first.
        shape: of the parameter that they belong to; see `take_shape`.
        on_change: weak, because the optimizer that it belongs to holds the entry.
    """

    __slots__ = ("_on_change", "_shape")

    def __init__(
        self,
        values: Mapping[str, Any],
        shape: torch.Size,
        on_change: weakref.ReferenceType[Callable[[], None]],
    ) -> None:
        super().__init__(values)
        self._shape = shape
        self._on_change = on_change

    def take_shape(self, param: Tensor, keys: Iterable[str]) -> None:
        """Give state the shape of a parameter that has got another one for the same elements.

        Args:
            param: the parameter; nothing is done if it is not contiguous.
            keys: of state that has an element for each of the parameter's.
        """
        if param.shape.numel() != self._shape.numel() or not param.is_contiguous():
            return
        for key in keys:
            value = self.get(key)
            if isinstance(value, Tensor) and value.shape == self._shape and value.is_contiguous():
                super().__setitem__(key, value.view(param.shape))
        self._shape = param.shape

    def renew(self, values: Mapping[str, Any]) -> None:
        """Take other tensors for the same state, after its optimizer has moved it."""
        super().update(values)

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter when it was last seen."""
        return self._shape

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    __setitem__ = _announced(dict.__setitem__)
    __delitem__ = _announced(dict.__delitem__)
    __ior__ = _announced(dict.__ior__)
    clear = _announced(dict.clear)
    pop = _announced(dict.pop)
    popitem = _announced(dict.popitem)
    update = _announced(dict.update)
