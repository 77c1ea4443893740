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
BESIDE = "_deepspeed_ext_beside"  # likewise


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


def is_in_memory(param: Tensor) -> bool:
    """Tell whether a parameter is streamed from host memory, not from a file."""
    home = home_of(param)
    return home is not None and home is not AT_HOME and not home.keeps_memory


def set_beside(param: Tensor, is_beside: bool = True) -> None:
    """Say whether a parameter is of a model that streams, itself streamed or not.

    Then its gradients are final when they are there, as those of streamed ones are taken to be,
    unless there are other processes.
    """
    if is_beside:
        setattr(param, BESIDE, _Mark())
    elif hasattr(param, BESIDE):
        delattr(param, BESIDE)


def is_beside(param: Tensor) -> bool:
    """Tell whether that was said."""
    return getattr(param, BESIDE, None) is not None


class _Mark:
    """Of a parameter; a copy or a pickle has None in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_mark, ()


def _no_mark() -> None:
    """Return None."""


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
