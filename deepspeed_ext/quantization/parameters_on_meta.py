"""Models made without memory for parameters, but with buffers, which files may lack."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _EmptyOnMeta(TorchFunctionMode):
    """Puts on meta what is made without values, as modules make parameters.

    What is made with values, such as a table of angles, has them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def made_without_parameters(make: Callable[[], nn.Module]) -> nn.Module:
    """Return what a function makes, on the CPU, but that parameters are on meta."""
    with torch.device("cpu"), _EmptyOnMeta():
        return make()
