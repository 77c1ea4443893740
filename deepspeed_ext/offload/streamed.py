"""Parameters that rest in host memory and are used elsewhere: who streams them has marked them.

An optimizer steps such a parameter where it rests: its host copy has the same memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.tensors import past_torch_function

Take = Callable[[Tensor, Tensor], bool]
_HOME = "_deepspeed_ext_home"  # the attribute of a parameter
# Streams a parameter without memory, which is only counted.
AT_HOME: Any = object()
_ALONE = "_deepspeed_ext_alone"  # likewise


class Home(Protocol):
    """What streams a parameter, and has its gradients first."""

    @property
    def keeps_memory(self) -> bool:
        """Whether a parameter keeps the memory that it rests in, as nothing else is so: a file."""

    def memory(self, tensors: Sequence[Tensor], /) -> list[Tensor]:
        """Return memory to rest in, in the shape, dtype and layout of each of these."""

    def hand_over(self, param: Tensor, take: Take | None) -> None:
        """Have gradients of a parameter taken from the device where they are made.

        Args:
            param: that is streamed.
            take: is called in backward with it and a gradient, and tells whether it takes that;
                None: nobody does.
        """

    def hands_over(self, param: Tensor) -> bool:
        """Tell whether somebody takes them."""


def set_home(param: Tensor, home: Home | None) -> None:
    """Mark a parameter, or take its mark."""
    if home is not None:
        setattr(param, _HOME, home)
    elif hasattr(param, _HOME):
        delattr(param, _HOME)


def home_of(param: Tensor) -> Home | None:
    """Return what streams a parameter, or None."""
    found: Home | None = getattr(param, _HOME, None)
    return found


def set_alone(param: Tensor) -> None:
    """Say that gradients of a parameter are final when they are there: no process adds others."""
    setattr(param, _ALONE, True)


def is_alone(param: Tensor) -> bool:
    """Tell whether that was said."""
    return hasattr(param, _ALONE)


def at_rest(param: Tensor) -> Tensor:
    """Return a parameter with the memory of one that is streamed, and a counter of its own."""
    with past_torch_function():
        return torch.nn.Parameter(param.data, requires_grad=param.requires_grad)


def move(param: Tensor, memory: Tensor) -> None:
    """Give a streamed parameter other memory, from any thread, also while others wait for it."""
    with past_torch_function():
        param.data = memory


def are_apart(a: Any, b: Any) -> bool:
    """Tell whether two tensors of one shape have different memory."""
    return bool(a.data_ptr() != b.data_ptr())
