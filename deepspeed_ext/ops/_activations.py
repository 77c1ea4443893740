"""The activations that ops know, each once: its number, and its definition in plain torch."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# In the order of activation.h. Where 1 and an erf or tanh below 0 would cancel, they do not here.
_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
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
