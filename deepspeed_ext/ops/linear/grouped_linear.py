"""Linear layers of experts: each row is multiplied with the weight of its own."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.grouped_products import (
    outer_products_cpu,
    outer_products_cuda,
    products_cpu,
    products_cuda,
)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return x @ w.T + b for each row of x, where w and b are those of the row's expert.

    Rows are in the order of their experts: those of expert e end before row offsets[e], and begin
    where those of the expert before it end. Any expert may have none. Rows behind the last offset
    belong to no expert: their results are 0, whatever is in them, and they have no gradient, nor
    has an expert without rows: its gradients are 0.

    The same arguments give the same bits, in gradients too; nothing is promised of a row among
    others. Gradients have gradients. Under autocast nothing is cast: dtypes that differ are
    refused, so cast them to one. The host never waits for CUDA, not for the offsets either, and no
    sizes depend on them: calls can be captured in a graph, and compiled into one.

    Torch multiplies. On CUDA in bfloat16, with compute capability 9 or 10 and up to 1,023 experts,
    that is `torch.nn.functional.grouped_mm`; rows that are no multiple of 16 bytes are copied for
    it. For all else torch's function would read the offsets: rows are copied to where those of an
    expert begin a block of 16 to 1,024, and blocks are multiplied, each with a copy of its weight,
    of which there are 128 MiB at a time, or one. That is meant to be right, not fast. On the CPU
    each expert's rows are multiplied in turn, and nothing is copied.

    Args:
        x: (rows, k), float32, bfloat16 or float16.
        weight: (experts, n, k), of the dtype of x, in any layout.
        offsets: (experts,), int32: the end of each expert's rows, as `F.grouped_mm` takes them. No
            less than the one before it, and at most as many as there are rows: on the CPU others
            are refused, on CUDA they are not looked at, and results are then undefined.
        bias: None, or (experts, n), of the dtype of x. On CUDA it is added to products that are
            rounded already.

    Returns:
        (rows, n), contiguous, of the dtype of x.

    See: ``grouped_linear_ref`` is the same in float64.
    """
    out: Tensor = _OP(x, weight, offsets, bias)
    return out


def _fake(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients; bias is a weight for what is always 1."""
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
    ones = grad.new_ones(grad.shape[0], 1) if needs_bias else None
    return (
        _OP(grad, weight.transpose(1, 2), offsets, None) if needs_x else None,
        _of_weight(grad, x, weight, offsets) if needs_weight else None,
        None,
        None if ones is None else _OF_WEIGHT(grad, ones, offsets).squeeze(2),
    )


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the weight, laid out as the weight is, or torch would copy it."""
    if weight.stride(1) < weight.stride(2):
        transposed: Tensor = _OF_WEIGHT(x, grad, offsets)
        return transposed.transpose(1, 2)
    found: Tensor = _OF_WEIGHT(grad, x, offsets)
    return found


def _fake_of_weight(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])


def _save_of_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_weight(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grad, x, offsets = ctx.saved_tensors
    needs_grad, needs_x, _ = ctx.needs_input_grad
    return (
        _OP(x, grad_out, offsets, None) if needs_grad else None,
        _OP(grad, grad_out.transpose(1, 2), offsets, None) if needs_x else None,
        None,
    )


# Of any number of rows: kernels that read the chosen experts once for few are other overloads.
_OP = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias) -> Tensor",
    {"cpu": products_cpu, "cuda": products_cuda},
    fake=_fake,
    backward=_backward,
    setup_context=_save,
)
_OF_WEIGHT = define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
    {"cpu": outer_products_cpu, "cuda": outer_products_cuda},
    fake=_fake_of_weight,
    backward=_backward_of_weight,
    setup_context=_save_of_weight,
)


def _flops(x: Any, weight: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return int(2 * math.prod(x) * weight[1])


def _flops_of_weight(grad: Any, x: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return int(2 * math.prod(grad) * x[1])


register_flop_formula(_OP.overloadpacket)(_flops)
register_flop_formula(_OF_WEIGHT.overloadpacket)(_flops_of_weight)


def grouped_linear_ref(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Do what grouped_linear does, in float64 and plain torch: its definition, for tests."""
    ends = offsets.tolist()
    found = [
        F.linear(
            x[begin:end].double(),
            weight[expert].double(),
            None if bias is None else bias[expert].double(),
        )
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    last = ends[-1] if ends else 0
    rest = x.new_zeros(x.shape[0] - last, weight.shape[1], dtype=torch.float64)
    return torch.cat([*found, rest])
