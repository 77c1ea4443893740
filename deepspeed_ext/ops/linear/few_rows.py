"""What skinny GEMMs share in Python, whatever their weight is stored as."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._activations import reference

MOST_ROWS = 64  # that the kernels take: see few_rows_ops.h


def are_few(x: Tensor) -> bool:
    """Tell whether there are no more rows than the kernels take; if it is not known, there are."""
    return is_known(_rows_of(x), lambda rows: rows <= MOST_ROWS)


def are_many(x: Tensor) -> bool:
    """Tell whether there are more rows than the kernels take; if it is not known, there are not."""
    return is_known(_rows_of(x), lambda rows: rows > MOST_ROWS)


def _rows_of(x: Tensor) -> int:
    return 1 if x.dim() == 0 else math.prod(x.shape[:-1])


def is_known(rows: int, holds: Callable[[int], bool]) -> bool:
    """Tell whether something holds for the number of rows, and torch.compile knows that it does."""
    if not torch.compiler.is_compiling() and not isinstance(rows, torch.SymInt):
        return holds(rows)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(holds(rows))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which nothing is cast, as nothing is in a skinny GEMM."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def check_many(
    op: str,
    x: Tensor,
    name: str,
    weight: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    residual: Tensor | None,
) -> None:
    """Refuse what kernels of skinny GEMMs refuse, and torch would broadcast, promote or not name.

    Args:
        name: what an error calls the weight.
        weight: has its rows.
        dtype: that it must have.

    Raises:
        ValueError: an argument does not fit; in the words of few_rows_ops.h.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x is {named(x.dtype)}, expected float32, bfloat16 or float16")
    if gated and activation is None:
        raise ValueError(f"{op}: gated is True, expected an activation beside it")
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {list(weight.shape)}, expected two dimensions")
    rows = weight.shape[0]
    if gated and rows % 2:
        raise ValueError(f"{op}: {name} has {rows} rows, expected an even number, as gated is True")
    check_like(op, name, weight, x, weight.shape, dtype)
    check_like(op, "bias", bias, x, (rows,), x.dtype)
    columns = rows // 2 if gated else rows
    check_like(op, "residual", residual, x, (*x.shape[:-1], columns), x.dtype)


def check_like(
    op: str,
    name: str,
    given: Tensor | None,
    x: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Refuse an argument that is on another device than x, or has another shape or dtype.

    Raises:
        ValueError: it does, and is not None.
    """
    if given is None:
        return
    if given.device != x.device:
        raise ValueError(f"{op}: {name} is on {given.device}, expected {x.device}")
    if given.shape != shape:
        raise ValueError(f"{op}: {name} has shape {list(given.shape)}, expected {list(shape)}")
    if given.dtype != dtype:
        raise ValueError(f"{op}: {name} is {named(given.dtype)}, expected {named(dtype)}")


def check_memory(op: str, **tensors: Tensor | None) -> None:
    """Refuse what has been freed, as fully_shard does with weights: kernels would read anything.

    Raises:
        ValueError: a tensor has elements, and no memory.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and tensor.untyped_storage().nbytes() == 0:
            raise ValueError(f"{op}: {name} has no memory, expected {tensor.numel()} elements")


def named(dtype: torch.dtype) -> str:
    """Return what errors call a dtype."""
    return str(dtype).removeprefix("torch.")


def by_torch(
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
    from deepspeed_ext.ops.elementwise.bias_activation import bias_activation
    from deepspeed_ext.ops.elementwise.gated_activation import gated_activation

    if activation is None:
        out = product(bias)
    elif gated:
        out = gated_activation(product(bias), activation=activation)
    else:
        out = bias_activation(product(None), bias, activation=activation)
    return out if residual is None else out + residual


def grad_of_activated(grad_out: Tensor, sums: Tensor, activation: int, gated: bool) -> Tensor:
    """Return the gradient of what was activated, which has been worked out again."""
    import deepspeed_ext.ops.elementwise.bias_activation  # it defines the op
    import deepspeed_ext.ops.elementwise.gated_activation  # noqa: F401  # likewise

    ops = torch.ops.deepspeed_ext
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
