"""Layer normalization along the last dimension, with a residual or without."""

from typing import Literal, overload

import torch
from torch import Tensor

from deepspeed_ext.ops._library import bare
from deepspeed_ext.ops.norm.norms import Norm, affine_ref, flat, rows_of, total_ref

_norm = Norm("layer_norm")
kernels = bare(_norm.op), bare(_norm.backward_op)  # for who has no graph of autograd's


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    return_sum: Literal[True] = True,
) -> tuple[Tensor, Tensor]: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Subtract from each row, along the last dimension, its mean, and divide by its deviation.

    The result is multiplied by weight, and bias is added. The variance is that of the deviations
    from the mean, and the mean has more digits than a float32: small deviations from a large mean
    are as good as others. A row is NaN if its elements, less its first ones, add up to more than a
    float32 can be, 3.4e38. All that ``rms_norm`` says of the sum with a residual, of bits, scaled
    squares, gradients and what is kept for them holds here too.

    Args:
        x: (..., n), as ``rms_norm`` takes it.
        weight: (n,), any of its dtypes; None for ones.
        bias: (n,), any of these dtypes; None for zeros.
        residual: None, or the shape of x, any of these dtypes: x + x_bias + residual is normalized.
        x_bias: None, or (n,), any of these dtypes. Only with a residual.
        eps: added to the variance, which is a mean over n elements, not n - 1.
        weight_offset: added to a weight that is given: 1.0 for models that store the weight less 1.
        return_sum: whether the sum is wanted too; without a residual there is none.

    Returns:
        The result, contiguous, of the dtype of x; with a residual and return_sum a tuple of it and
        of the sum, as it was rounded to the dtype of residual and then normalized.

    See: Ba, Kiros & Hinton, "Layer Normalization", 2016, equation 4, with eps under the root.
    ``layer_norm_ref`` is the same in float64.
    """
    options = {"eps": eps, "weight_offset": weight_offset}
    out: Tensor | tuple[Tensor, Tensor] = _norm(
        x, weight, bias, residual, x_bias, return_sum, options
    )
    return out


def layer_norm_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, for who has no graph of autograd's."""
    options = dict(eps=eps, weight_offset=0.0, needs_grad_weight=True)
    grads: tuple[Tensor, ...] = _norm.backward_op(grad_out, None, x, weight, bias, None, **options)
    return grads[0], grads[1], grads[2]


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` by ``layer_norm``, with its arguments, parameters and state.

    Apex and Colossal-AI have it under this name. Theirs takes parameters of float32 or of the dtype
    of x; here any of the op's dtypes mix. The result has the dtype of x.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized over its last dimensions, which are `normalized_shape`."""
        rows = rows_of("FusedLayerNorm", x, self.normalized_shape)
        out = layer_norm(rows, flat(self.weight), flat(self.bias), eps=self.eps)
        return out.view(x.shape)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    return_sum: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what layer_norm does, in float64 and plain torch: its definition, for tests."""
    total = total_ref(x, residual, x_bias)
    deviations = total - total.mean(-1, keepdim=True)
    normed = deviations / (deviations.square().mean(-1, keepdim=True) + eps).sqrt()
    out = affine_ref(normed, weight, bias, weight_offset)
    return out if residual is None or not return_sum else (out, total)
