"""Root mean square normalization along the last dimension, with a residual or without."""

from typing import Literal, overload

import torch
from torch import Tensor

from deepspeed_ext.ops.norm.norms import Norm, affine_ref, flat, rows_of, total_ref

_norm = Norm("rms_norm")


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor,
    x_bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_sum: Literal[True] = True,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide each row, along the last dimension, by its root mean square, and multiply by weight.

    With a residual, x + x_bias + residual is normalized, and returned beside the result, as a block
    of a transformer that normalizes first needs it: one pass over memory instead of two or three. A
    block that normalizes last goes on with the result alone: return_sum=False. The sum is then kept
    only where a gradient is recorded.

    A row has the same bits alone, in any batch and at any place in it; on the CPU also with any
    number of threads and any instruction set. Gradients too, and those of vectors are the same in
    every run. Arithmetic is in float32; squares that would overflow, or vanish beside an eps that
    is as small, are scaled. All gradients come from one pass over memory; nothing is kept for them
    but x (or the sum) and the vectors. Beyond a root mean square of 1e19, or below 1e-19 with an
    eps that is smaller still, they overflow; below 2.9e-39 the result does, too. The gradients of x
    and of residual are that of the sum, rounded to the dtype of residual first. There is no
    gradient of a gradient.

    Args:
        x: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA, n up to any length. Rows
            that lie in one piece each, at equal distances, or in groups of such at equal distances,
            are read as they lie: so are the heads of q in a slice of a projection. Other layouts
            are copied first.
        weight: (n,), any of these dtypes; None for ones.
        residual: None, or the shape of x, any of these dtypes.
        x_bias: None, or (n,), any of these dtypes: what the matrix multiplication before has left
            to add to x. Only with a residual.
        eps: added to the mean of the squares.
        weight_offset: added to a weight that is given: 1.0 for models that store the weight less 1,
            as Gemma does.
        return_sum: whether the sum is wanted too; without a residual there is none.

    Returns:
        The result, contiguous, of the dtype of x; with a residual and return_sum a tuple of it and
        of the sum, as it was rounded to the dtype of residual and then normalized.

    See: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; eps is under
    the root, as in Llama. ``rms_norm_ref`` is the same in float64.
    """
    options = {"eps": eps, "weight_offset": weight_offset}
    out: Tensor | tuple[Tensor, Tensor] = _norm(
        x, weight, None, residual, x_bias, return_sum, options
    )
    return out


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` by ``rms_norm``, with its arguments, parameters and state.

    Where eps is None it is 1.19e-7, `torch.finfo(torch.float32).eps`: that of the dtype of the
    arithmetic, as in torch, whose text said that of the dtype of x up to 2.11. Apex has 1e-5.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized over its last dimensions, which are `normalized_shape`."""
        rows = rows_of("FusedRMSNorm", x, self.normalized_shape)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rms_norm(rows, flat(self.weight), eps=eps).view(x.shape)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what rms_norm does, in float64 and plain torch: its definition, for tests."""
    total = total_ref(x, residual, x_bias)
    normed = total / (total.square().mean(-1, keepdim=True) + eps).sqrt()
    out = affine_ref(normed, weight, None, weight_offset)
    return out if residual is None or not return_sum else (out, total)
