"""How far activations and their slopes may be off, as the formulas' roundings add up."""

import math

import torch
from torch import Tensor

from deepspeed_ext.ops._activations import NAMES

__all__ = ["NAMES", "ROUNDING", "errors_of"]
ROUNDING = torch.finfo(torch.float32).eps / 2


def errors_of(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Bound the error of the value at x and of the slope there; x is float64.

    What a value is multiplied from is off by so many roundings: of sigmoid by 5 units in the last
    place (CUDA), of the normal distribution by 7. The relative error of the argument of an exp is
    an absolute one of its exponent. Where terms of a slope cancel, magnitudes count.
    """
    x = x.clamp(-1e4, 1e4)  # no infinity times 0; beyond, the share is 0 or 1
    if activation == "gelu":
        share = torch.special.erfc(-x / math.sqrt(2)) / 2
        other = x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        roundings = 24 + 2 * x * x
    elif activation == "relu":
        share, other, roundings = torch.ones_like(x), torch.zeros_like(x), 0
    else:
        argument, slope = x, torch.ones_like(x)
        if activation == "gelu_quick":
            argument, slope = 1.702 * x, 1.702 * slope
        if activation == "gelu_tanh":
            linear = math.sqrt(8 / math.pi)
            argument, slope = linear * (x + 0.044715 * x**3), linear * (1 + 0.134145 * x * x)
        share = torch.sigmoid(argument)
        other = x * share * torch.sigmoid(-argument) * slope
        roundings = 16 if activation == "silu" else 24 + 6 * argument.abs()
    least = 2.0**-120  # what is below may be 0
    roundings = ROUNDING * (roundings + 4 * torch.ones_like(x))
    value = roundings * (x * share).abs() + least * (1 + x.abs())
    return value, roundings * (share.abs() + other.abs()) + least * (1 + x.abs())
