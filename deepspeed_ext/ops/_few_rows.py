"""What matrix multiplications on few rows share in Python, whatever their weight is stored as."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops._activations import reference

MOST_ROWS = 64  # that the kernels take: see few_rows.h


def are_few(x: Tensor) -> bool:
    """Tell whether there are no more rows than the kernels take; if it is not known, there are."""
    return _is_known(x, lambda rows: rows <= MOST_ROWS)


def are_many(x: Tensor) -> bool:
    """Tell whether there are more rows than the kernels take; if it is not known, there are not."""
    return _is_known(x, lambda rows: rows > MOST_ROWS)


def _is_known(x: Tensor, holds: Callable[[int], bool]) -> bool:
    """Tell whether something holds for the number of rows, and torch.compile knows that it does."""
    rows = 1 if x.dim() == 0 else math.prod(x.shape[:-1])
    if not torch.compiler.is_compiling() and not isinstance(rows, torch.SymInt):
        return holds(rows)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(holds(rows))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which nothing is cast, as nothing is with few rows."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def by_torch(
    op: str,
    product: Callable[[Tensor | None], Tensor],
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """Return residual + activation(x @ weight.T + bias), each step rounded to the dtype.

    Args:
        product: gives x @ weight.T, and adds what it is called with, unless that is None.
    """
    from deepspeed_ext.ops import bias_activation, gated_activation

    if gated:
        if activation is None:
            raise ValueError(f"{op}: gated is True, expected an activation beside it")
        out = gated_activation(product(bias), activation=activation)
    elif activation is None:
        out = product(bias)
    else:
        out = bias_activation(product(None), bias, activation=activation)
    if residual is not None and residual.shape != out.shape:
        raise ValueError(
            f"{op}: residual has shape {list(residual.shape)}, expected {list(out.shape)}"
        )
    return out if residual is None else out + residual


def grad_of_sums(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int | None,
    gated: bool,
) -> Tensor:
    """Return the gradient of x @ weight.T + bias, and work out again what was activated."""
    if activation is None:
        return grad_out
    ops = torch.ops.deepspeed_ext
    sums = F.linear(x, weight, bias)
    grad: Tensor
    if gated:
        grad = ops.gated_activation_backward.packed(
            grad_out, sums, activation=activation, gate_last=False
        )
    else:
        grad, _ = ops.bias_activation_backward(
            grad_out, sums, None, activation=activation, needs_grad_bias=False
        )
    return grad


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """Return residual + activation(x @ weight.T + bias) in float64."""
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    gate, up = out.chunk(2, -1) if gated else (out, None)
    out = gate if activation is None else reference(activation, gate)
    out = out if up is None else out * up
    return out if residual is None else out + residual.double()


def flops(x: Any, n: int) -> int:
    """Return the FLOPs of a multiplication with a weight of n rows, by the shape of x."""
    count: int = 2 * math.prod(x) * n
    return count
