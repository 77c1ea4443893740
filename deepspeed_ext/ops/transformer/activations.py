"""The activations that ops know, each once: its number, and its definition in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {  # in the order of csrc: activation.h
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
}
NAMES = tuple(_REFERENCES)


def number_of(op: str, activation: str) -> int:
    """Return the number that kernels know an activation by.

    Args:
        op: what an error calls the op.
        activation: its name.

    Raises:
        ValueError: there is no activation of this name.
    """
    if activation not in NAMES:
        raise ValueError(f"{op}: activation is {activation!r}, expected one of {', '.join(NAMES)}")
    return NAMES.index(activation)


def reference(activation: str, x: Tensor) -> Tensor:
    """Return what the activation makes of x."""
    return _REFERENCES[activation](x)
