"""Lazy: a tensor that is put together when it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lazy:
    """A tensor that is put together when it is asked for.

    Args:
        described: the same on meta.
        read: returns it, on the CPU.
    """

    described: Tensor
    read: Callable[[], Tensor]


def lazy(shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]) -> Lazy:
    """Return a tensor of this kind."""
    return Lazy(torch.empty(shape, dtype=dtype, device="meta"), read)


def lazy_number(value: float) -> Lazy:
    """Return a number as optimizers keep a step."""
    return lazy(torch.Size(), torch.float32, lambda: torch.tensor(value, dtype=torch.float32))
