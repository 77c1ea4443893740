"""Root mean square normalization along the last dimension, with a residual or without."""

from typing import Any, overload

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define

_LIBRARIES = {"cpu": "cpu_rms_norm", "cuda": "fused_rms_norm"}


def _backward_fake(
    grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    if weight is None or not options["needs_grad_weight"]:
        dtype = torch.float32 if weight is None else weight.dtype
        return x.new_empty(x.shape), x.new_empty(0, dtype=dtype)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_rms_norm_backward_op = define(
    "rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? weight, *, float eps,"
    " bool needs_grad_weight) -> (Tensor grad_x, Tensor grad_weight)",
    _LIBRARIES,
    fake=_backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    x, weight = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = keyword_only_inputs["eps"]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return _gradients(ctx, grad_out, None, x, weight, ctx.needs_input_grad[1])


def _save_sum(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, Tensor]
) -> None:
    x, _, weight = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.eps = keyword_only_inputs["eps"]
    ctx.x_dtype = x.dtype


def _backward_of_sum(
    ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    if grad_out is None:
        grad, grad_weight = grad_sum, None
    else:
        needed = ctx.needs_input_grad[2]
        grad, grad_weight = _gradients(ctx, grad_out, grad_sum, total, weight, needed)
    return None if grad is None else grad.to(ctx.x_dtype), grad, grad_weight


def _gradients(
    ctx: Any,
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    grad_x, grad_weight = _rms_norm_backward_op(
        grad_out, grad_sum, x, weight, eps=ctx.eps, needs_grad_weight=needs_grad_weight
    )
    return grad_x, grad_weight if needs_grad_weight else None


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor? weight, *, float eps) -> Tensor",
    _LIBRARIES,
    fake=lambda x, weight, *, eps: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_save,
)
_rms_norm_residual_op = define(
    "rms_norm.residual(Tensor x, Tensor residual, Tensor? weight, *, float eps)"
    " -> (Tensor out, Tensor sum)",
    _LIBRARIES,
    fake=lambda x, residual, weight, *, eps: (
        x.new_empty(x.shape),
        residual.new_empty(residual.shape),
    ),
    backward=_backward_of_sum,
    setup_context=_save_sum,
)


@overload
def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide each row, along the last dimension, by its root mean square, and multiply by weight.

    With a residual, x + residual is normalized, and returned beside the result, as a block of a
    transformer needs it: one pass over memory instead of two.

    A row has the same bits alone, in any batch and at any place in it; on the CPU also with any
    number of threads and any instruction set. Gradients too, and that of weight is the same in
    every run. Arithmetic is in float32, so the squares of a row whose elements are beyond 1e19
    overflow, as in torch. Both gradients come from one pass over memory; nothing is kept for them
    but x (or x + residual) and weight. There is no gradient of a gradient.

    Args:
        x: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one piece
            each, at equal distances, are read as they lie; other layouts are copied first.
        weight: (n,), any of these dtypes; None for ones.
        residual: None, or the shape of x, any of these dtypes.
        eps: added to the mean of the squares.

    Returns:
        The result, contiguous, of the dtype of x; with a residual a tuple of it and of the sum, as
        it was rounded to the dtype of residual and then normalized.

    Raises:
        ValueError: an argument breaks a rule above; the text names it, its value and the rule.
        BuildError: the native library of the device could not be built or loaded.

    See: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; eps is under
    the root, as in Llama. ``rms_norm_ref`` is the same in float64.
    """
    if residual is None:
        out: Tensor = _rms_norm_op(x, weight, eps=eps)
        return out
    both: tuple[Tensor, Tensor] = _rms_norm_residual_op(x, residual, weight, eps=eps)
    return both


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what rms_norm does, in float64 and plain torch: its definition, for tests."""
    total = x.double() if residual is None else x.double() + residual.double()
    out = total / (total.square().mean(-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight.double()
    return out if residual is None else (out, total)
