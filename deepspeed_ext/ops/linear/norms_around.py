"""An RMS norm that is fused into the skinny GEMMs before and after it.

The norm of h is h g / rms(h), g being its weight. The epilogue of the GEMM before it
rounds h g; the one after it divides its sums by rms(h), as it would have by dividing each element
of what it multiplies.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops._library import check_numbers

_SQUARED = 8  # neighbours whose squares are added up first: see few_rows_ops.h


class NextNorm(NamedTuple):
    """The RMS norm that comes after a linear layer, which begins it in a fused epilogue.

    Args:
        weight: (n,), of the dtype of the layer's x.
        eps: added to the mean of the squares.
        weight_offset: added to the weight: 1.0 for models that store it less 1, as Gemma does.
    """

    weight: Tensor
    eps: float = 1e-6
    weight_offset: float = 0.0


class Undivided(NamedTuple):
    """Unnormalized rows: times the weight of an RMS norm, but not divided by their rms yet.

    A row of x and one of squares belong together: who takes some rows takes them of both.

    Args:
        x: (..., n), float32 or bfloat16: what is normalized times the norm's weight.
        squares: (..., n / 8), float32: the squares of each 8 neighbours of what is normalized,
            added up.
        eps: of the norm.
    """

    x: Tensor
    squares: Tensor
    eps: float


def fake_results(out: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what an op returns with `out`: of no norm after it, empty tensors."""
    if norm_weight is None:
        return out, out.new_empty(0), out.new_empty(0, dtype=torch.float32)
    squares = out.new_empty(*out.shape[:-1], out.shape[-1] // _SQUARED, dtype=torch.float32)
    return out, torch.empty_like(out), squares


def options_of(op: str, x: Tensor | Undivided, norm: NextNorm | None) -> dict[str, Any]:
    """Return the numbers that an op, which errors name, takes of the norms around it."""
    options = {
        "eps": x.eps if isinstance(x, Undivided) else 0.0,
        "weight_offset": 0.0 if norm is None else norm.weight_offset,
    }
    if type(options["eps"]) is not float or type(options["weight_offset"]) is not float:
        check_numbers(op, **options)
    return options


def divided_ref(x: Tensor | Undivided) -> Tensor:
    """Return the rows with the division, in float64."""
    if isinstance(x, Tensor):
        return x.double()
    mean = x.squares.double().sum(-1, keepdim=True) / max(1, x.x.shape[-1])
    return x.x.double() / (mean + x.eps).sqrt()


def next_norm_ref(out: Tensor, norm: NextNorm) -> Undivided:
    """Return what a layer leaves of a norm after it, in float64, `out` being its results."""
    wide = out.double()
    squares = wide.square().unflatten(-1, (-1, _SQUARED)).sum(-1)
    return Undivided(wide * (norm.weight.double() + norm.weight_offset), squares, norm.eps)
