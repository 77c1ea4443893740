"""Tokens to the rows of their experts, and back with the weights of the choices."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.moe.routing import LIBRARIES, Routing


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _unpermute_op(grad, *ctx.saved_tensors, None), None, None


def _save_slots(
    ctx: Any, inputs: tuple[Tensor, ...], keyword_only_inputs: Any, output: Tensor
) -> None:
    ctx.save_for_backward(*inputs[1:])


_permute_op = define(
    "moe_permute(Tensor x, Tensor slots, Tensor offsets, *, SymInt rows) -> Tensor",
    LIBRARIES,
    fake=lambda x, slots, offsets, *, rows: x.new_empty((rows, x.shape[-1])),
    backward=_permute_backward,
    setup_context=_save_slots,
)
_unpermute_backward_op = define(
    "moe_unpermute_backward(Tensor grad_out, Tensor y, Tensor slots, Tensor offsets,"
    " Tensor weights) -> (Tensor grad_y, Tensor grad_weights)",
    LIBRARIES,
    fake=lambda grad_out, y, slots, offsets, weights: (
        y.new_empty(y.shape),
        weights.new_empty(weights.shape),
    ),
)


def _save_all(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    y, slots, offsets, weights = inputs
    assert y is not None
    ctx.rows = y.shape[0]
    ctx.save_for_backward(*([slots, offsets] if weights is None else inputs))


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    saved = ctx.saved_tensors  # once: checkpointing makes them again at each look
    if len(saved) == 2:
        return _permute_op(grad, *saved, rows=ctx.rows), None, None, None
    grad_y, grad_weights = _unpermute_backward_op(grad, *saved)
    return grad_y, None, None, grad_weights


_unpermute_op = define(
    "moe_unpermute(Tensor y, Tensor slots, Tensor offsets, Tensor? weights) -> Tensor",
    LIBRARIES,
    fake=lambda y, slots, offsets, weights: y.new_empty((*slots.shape[:-1], y.shape[-1])),
    backward=_unpermute_backward,
    setup_context=_save_all,
)


def moe_permute(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of all experts: a copy of each token for each of its choices.

    A token is read once. Rows that are no choice's, behind those of the last expert, are zeros. The
    gradient of a token is the sum of those of its copies, in the order of choices in float32,
    rounded once. The bits are the same on both devices.

    Args:
        x: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA; without n, the shape of
            the routing's tokens. Rows that lie in one piece each, at equal distances, are read as
            they lie; other layouts are copied first.
        routing: of moe_route or moe_assign. Its slots, offsets and rows are used. The slots that
            are not negative are numbers below the last of the offsets, all of them, each once; on
            the CPU it is an error if they are not. On CUDA, where nobody waits for them, one that
            is beyond the rows is dropped, and what a row has that is nobody's or several choices'
            is not said.

    Returns:
        (rows, n), with the dtype of x.

    See: ``moe_permute_ref`` is the same in float64.
    """
    if type(routing) is not Routing:
        check_kinds("moe_permute", routing=(routing, Routing))
    found: Tensor = _permute_op(x, routing.slots, routing.offsets, rows=routing.rows)
    return found


def moe_unpermute(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Return for each token the sum of the rows of its choices, each times its weight.

    The terms are added up in the order of choices in float32, and the sum is rounded once. A choice
    that is dropped adds nothing, whatever its weight is. Backward reads each row and each gradient
    once for both gradients, and rows that are no choice's have the gradient 0; those of weights are
    sums in float32 in a fixed order.

    Args:
        y: (rows, n), float32, bfloat16 or float16, on the CPU or on CUDA: what experts made of
            moe_permute's rows.
        routing: see moe_permute.
        weights: (..., k), float32, bfloat16 or float16. None: those of the routing.

    Returns:
        (..., n), with the dtype of y.

    See: ``moe_unpermute_ref`` is the same in float64.
    """
    if type(routing) is not Routing:
        check_kinds("moe_unpermute", routing=(routing, Routing))
    weights = routing.weights if weights is None else weights
    found: Tensor = _unpermute_op(y, routing.slots, routing.offsets, weights)
    return found


def moe_permute_ref(x: Tensor, routing: Routing) -> Tensor:
    """Do what moe_permute does, in float64 and plain torch: its definition, for tests."""
    slots, rows = routing.slots.flatten(), routing.rows
    copies = x.double()[..., None, :].expand(*routing.slots.shape, x.shape[-1])
    found = copies.new_zeros(rows + 1, x.shape[-1])
    found = found.index_copy(0, slots.where(slots >= 0, rows), copies.flatten(end_dim=-2))
    return found[:rows]


def moe_unpermute_ref(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Do what moe_unpermute does, in float64 and plain torch: its definition, for tests."""
    weights = routing.weights if weights is None else weights
    rows = torch.cat([y.double(), y.new_zeros(1, y.shape[-1]).double()])[routing.slots]
    return (rows * weights.double().where(routing.slots >= 0, 0)[..., None]).sum(-2)
