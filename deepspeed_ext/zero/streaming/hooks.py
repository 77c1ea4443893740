"""Hooks of streamed modules."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Hook:
    """Calls a method of a stream; a pickle of it does nothing, a copy is of the same stream.

    Args:
        stream: that has the method.
        name: of that.
    """

    def __init__(self, stream: object, name: str) -> None:
        self._stream, self._name = stream, name

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        getattr(self._stream, self._name)(module, *rest)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_nothing, ()


def _hook_of_nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
