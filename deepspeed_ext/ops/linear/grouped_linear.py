"""Linear layers of experts: each row is multiplied with the weight of its own."""

import math
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._activations import number_of
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.few_rows import grad_of_activated
from deepspeed_ext.ops.linear.grouped_products import (
    outer_products_cpu,
    outer_products_cuda,
    products_cpu,
    products_cuda,
)
from deepspeed_ext.ops.linear.grouped_rows import (
    activated,
    are_few,
    check_options,
    fake_results,
    grouped_ref,
    permuted,
    unpermuted,
)

_NAME, _LIBRARIES = "grouped_linear", {"cpu": "cpu_grouped_linear", "cuda": "fused_grouped_linear"}


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Return activation(x @ w.T + b) for each row of x, where w and b are those of its expert.

    Rows are in the order of their experts: those of expert e end before row offsets[e], and begin
    where those of the expert before it end. Any expert may have none. Rows behind the last offset
    belong to no expert: their results are 0, whatever is in them, and they have no gradient, nor
    has an expert without rows: its gradients are 0. With `slots` x has tokens, and its rows are
    what ``moe_permute`` makes of them: a copy of each token for each of its experts.

    Few rows, up to 16 for each expert, but 64 at least and 512 at most, go to a kernel that reads
    the weight of each chosen expert once, and no other: on the CPU for 64 of its rows, on CUDA for
    8 or 16, of which all but the first are near by then. A row then has the same bits alone and in
    any batch, on the CPU with any number of threads and any instruction set: those that
    ``skinny_linear`` gives it with its expert's weight.

    With more rows, where torch.compile does not know how many there are, and with a weight whose
    rows do not lie in one piece each, torch multiplies; copies, products and activation are steps
    that each round to the dtype, and the same arguments give the same bits, but nothing is promised
    of a row among others. On CUDA in bfloat16, with compute capability 9 or 10 and up to 1,023
    experts, that is `torch.nn.functional.grouped_mm`; rows that are no multiple of 16 bytes are
    copied for it. For all else torch's function would read the offsets: rows are copied to
    where those of an expert begin a block of 16 to 1,024, and blocks are multiplied, each with a
    copy of its weight, of which there are 128 MiB at a time, or one. That is meant to be right, not
    fast. On the CPU each expert's rows are multiplied in turn.

    Gradients are by torch's multiplications, which work out again what was activated. Without an
    activation they have gradients. Under autocast nothing is cast: dtypes that differ are refused,
    so cast them to one. The host never waits for CUDA, not for the offsets either, and no sizes
    depend on them: calls can be captured in a graph, and compiled into one.

    Args:
        x: (rows, k), float32, bfloat16 or float16. With slots (..., k), the shape of the routing's
            tokens and k.
        weight: (experts, n, k), with `gated` (experts, 2 n, k), of the dtype of x, in any layout.
        offsets: (experts,), int32: the end of each expert's rows, as `F.grouped_mm` takes them. No
            less than the one before it, and at most as many as there are rows: on the CPU others
            are refused, on CUDA they are not looked at, and results are then undefined.
        bias: None, or (experts, n), with `gated` (experts, 2 n), of the dtype of x. On CUDA, with
            many rows, it is added to products that are rounded already.
        slots: None, or those of a routing, (..., choices), int64: the row of each choice of each
            token, or -1. On the CPU it is an error if a row before the last offset is not one
            choice's, as for ``moe_permute``; on CUDA nobody looks.
        activation: None, or one that ``bias_activation`` knows.
        gated: whether each weight has the rows of a gate first, then those of what it gates; needs
            an activation.

    Returns:
        (rows, n), contiguous, of the dtype of x; with slots as many rows as slots has elements.

    See: ``moe_route`` for slots and offsets. ``grouped_linear_ref`` is the same in float64.
    """
    check_kinds(_NAME, x=(x, Tensor), weight=(weight, Tensor), offsets=(offsets, Tensor))
    if slots is not None:
        check_kinds(_NAME, slots=(slots, Tensor))
    number = None if activation is None else number_of(_NAME, activation)
    if _is_for_kernel(x, weight, offsets, slots):
        options = dict(activation=number, gated=gated)
        found: Tensor = _FEW(x, weight, offsets, bias, slots, **options)
        return found
    n = weight.shape[1] if weight.dim() == 3 else 0  # what is wrong with it the op says
    check_options(_NAME, x, slots, activation, gated, n)
    out: Tensor = _OP(permuted(x, slots, offsets), weight, offsets, bias)
    return activated(out, activation, gated)


def _is_for_kernel(x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor | None) -> bool:
    """Tell whether rows are few, and weights lie as the kernel reads them."""
    if weight.dim() != 3 or not are_few(x, offsets, slots, _LIBRARIES):
        return False
    return weight.shape[2] < 2 or weight.stride(2) == 1


def _fake(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients; bias is a weight for what is always 1."""
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
    return (
        _OP(grad, weight.transpose(1, 2), offsets, None) if needs_x else None,
        _of_weight(grad, x, weight, offsets) if needs_weight else None,
        None,
        grad_of_bias(grad, offsets) if needs_bias else None,
    )


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the weight, laid out as the weight is, or torch would copy it."""
    if weight.stride(1) < weight.stride(2):
        transposed: Tensor = _OF_WEIGHT(x, grad, offsets)
        return transposed.transpose(1, 2)
    found: Tensor = _OF_WEIGHT(grad, x, offsets)
    return found


def grad_of_bias(grad: Tensor, offsets: Tensor) -> Tensor:
    """Return the sums of each expert's rows."""
    out: Tensor = _OF_WEIGHT(grad, grad.new_ones(grad.shape[0], 1), offsets)
    return out.squeeze(2)


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


def _fake_few(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    **options: Any,
) -> Tensor:
    return fake_results(x, weight.shape[1], slots, **options)


def _save_few(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _backward_few(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's multiplications."""
    x, weight, offsets, bias, slots = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias, _ = ctx.needs_input_grad
    activation, gated = ctx.options["activation"], ctx.options["gated"]
    rows = x
    if needs_weight or activation is not None:
        rows = permuted(x, slots, offsets)
    if activation is not None:
        grad = grad_of_activated(grad, _OP(rows, weight, offsets, bias), activation, gated)
    of_rows = _OP(grad, weight.transpose(1, 2), offsets, None) if needs_x else None
    return (
        None if of_rows is None else unpermuted(of_rows, slots, offsets),
        _OF_WEIGHT(grad, rows, offsets) if needs_weight else None,
        None,
        grad_of_bias(grad, offsets) if needs_bias else None,
        None,
    )


# Of any number of rows.
_OP = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias) -> Tensor",
    {"cpu": products_cpu, "cuda": products_cuda},
    fake=_fake,
    backward=_backward,
    setup_context=_save,
)
# Of few, by a kernel that reads the weights of the chosen experts once.
_FEW = define(
    "grouped_linear.few(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? slots, *,"
    " int? activation, bool gated) -> Tensor",
    _LIBRARIES,
    fake=_fake_few,
    backward=_backward_few,
    setup_context=_save_few,
)
_OF_WEIGHT = define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
    {"cpu": outer_products_cpu, "cuda": outer_products_cuda},
    fake=_fake_of_weight,
    backward=_backward_of_weight,
    setup_context=_save_of_weight,
)


def _flops(
    x: Any,
    weight: Any,
    offsets: Any,
    bias: Any,
    slots: Any = None,
    out_shape: Any = None,
    **options: Any,
) -> int:
    return int(2 * out_shape[0] * math.prod(weight[1:]))


def _flops_of_weight(grad: Any, x: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return int(2 * math.prod(grad) * x[1])


register_flop_formula(_OP.overloadpacket)(_flops)
register_flop_formula(_OF_WEIGHT.overloadpacket)(_flops_of_weight)


def grouped_linear_ref(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Do what grouped_linear does, in float64 and plain torch: its definition, for tests."""
    return grouped_ref(x, weight, offsets, bias, slots, activation, gated)
