"""Dropout as ops know it: the seed of a call, and the mask that it stands for, in plain torch."""

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import check_numbers

_WEYL = 0x9E3779B9  # as in noise.h, like the other numbers here
_LOW = 0xFFFFFFFF


def seed_of(
    op: str, x: Tensor, p: float, training: bool, seed: Tensor | None
) -> tuple[Tensor | None, float]:
    """Return what a kernel gets: the seed, and the rate; None and 0 where nothing is dropped.

    The seed is drawn here if there is none, by torch's generator of the device: so activation
    checkpointing draws it again, and a CUDA graph draws another one at each replay.

    Args:
        op: what an error calls the op.
        x: what is on the device.
        p: the rate.
        training: whether anything is dropped.
        seed: int64 of one element, or None.
    """
    check_kinds(op, x=(x, Tensor))
    if type(p) is not float:
        check_numbers(op, p=p)
        p = float(p)
    if p == 0 or (not training and 0 < p <= 1):
        return None, 0.0
    return draw_seeds(x.device)[0] if seed is None else seed, p


def draw_seeds(
    device: torch.device, count: int = 1, generator: torch.Generator | None = None
) -> tuple[Tensor, ...]:
    """Return so many seeds, of one element each, by one call of a generator, or of torch's own."""
    made = torch.randint(2**63 - 1, (count,), device=device, generator=generator)
    return tuple(made.split(1))


def kept_ref(seed: Tensor | None, p: float, like: Tensor) -> Tensor:
    """Return what each element is multiplied by, in float64: 0, or 1 / (1 - p).

    Args:
        seed: of one element, on the device of `like`; None: nothing is dropped.
        p: the rate.
        like: has the shape.
    """
    dropped = 0 if seed is None else round(p * 2**32)  # of 2^32
    if dropped == 0:
        return torch.ones_like(like, dtype=torch.float64)
    assert seed is not None
    element = torch.arange(like.numel(), device=like.device).view(like.shape)
    hashed = _mixed(_mixed(seed.view(()), 30, -0x40A7B892E31B1A47), 27, -0x6B2FB644ECCEEE15)
    hashed = hashed ^ _shifted(hashed, 31)
    mask = _shifted(hashed, 32) ^ (_shifted(element, 32) * _WEYL & _LOW)
    bits = (element & _LOW) * _WEYL + hashed & _LOW
    bits = (bits ^ bits >> 16 ^ mask) * 0x85EBCA6B & _LOW
    bits = (bits ^ bits >> 15) * 0xC2B2AE35 & _LOW
    return (bits >= dropped).double() * (1 / (1 - p) if p < 1 else 0)


def _shifted(a: Tensor, bits: int) -> Tensor:
    """Return 64 bits moved to the right, with zeros before them."""
    return a >> bits & (1 << 64 - bits) - 1


def _mixed(a: Tensor, bits: int, factor: int) -> Tensor:
    """Return a round of SplitMix64; the factor as a signed number."""
    return (a ^ _shifted(a, bits)) * factor
