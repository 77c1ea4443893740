"""Layer normalization as Apex's and Colossal-AI's module layernorm has it, by ``layer_norm``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops import layer_norm
from deepspeed_ext.ops.norm.layer_norm import layer_norm_gradients


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed tensor, and of each row its mean and what it was multiplied by.

    The two numbers cost two more passes over the input; ``layer_norm`` needs neither.

    Args:
        input: ends in `normalized_shape`; as ``layer_norm`` takes it.
        normalized_shape: the dimensions that are normalized as one.
        gamma: of that shape.
        beta: of that shape.
        eps: added to the variance.

    Returns:
        The shape of input, of the dtype of gamma; (rows,) float32, twice.
    """
    rows = _rows(input, normalized_shape)
    out = layer_norm(rows, gamma.reshape(-1), beta.reshape(-1), eps=eps)
    variance, mean = torch.var_mean(rows.float(), -1, correction=0)
    return out.view(input.shape).to(gamma.dtype), mean, (variance + eps).rsqrt()


def backward_affine(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, gamma and beta.

    Args:
        grad_output: of what ``forward_affine`` returned first.
        mean: not heeded, as it is worked out again.
        invvar: likewise.
        input: as there, like all that follows.
        normalized_shape: see there.
        gamma: see there.
        beta: see there.
        eps: see there.
    """
    rows = _rows(input, normalized_shape)
    of_rows = grad_output.reshape(rows.shape).to(rows.dtype)
    of_input, of_gamma, of_beta = layer_norm_gradients(
        of_rows, rows, gamma.reshape(-1), beta.reshape(-1), eps
    )
    return of_input.view(input.shape), of_gamma.view(gamma.shape), of_beta.view(beta.shape)


def _rows(input: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    return input.reshape(-1, torch.Size(normalized_shape).numel())
