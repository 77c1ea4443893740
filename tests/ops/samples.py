"""Dtypes, and random values of them, that the tests of ops share."""

import math
from functools import lru_cache

import torch
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """Ordinary values, the same on every device."""
    drawn = _kept if math.prod(shape) <= 1 << 21 else _drawn
    return drawn(shape, seed).to(device, dtype, copy=True)


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_kept = lru_cache(32)(_drawn)  # drawing takes longer than most ops; other dtypes come next
