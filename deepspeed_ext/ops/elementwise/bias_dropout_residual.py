"""Dropout between a bias and a residual, as behind the matrices of a transformer's block."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._dropout import kept_ref, seed_of
from deepspeed_ext.ops._library import bare, define

_LIBRARIES = {"cpu": "cpu_dropout", "cuda": "fused_dropout"}


def _backward_fake(
    grad_out: Tensor, bias: Tensor | None, seed: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    if bias is None or not options["needs_grad_bias"]:
        dtype = torch.float32 if bias is None else bias.dtype
        return grad_out.new_empty(grad_out.shape), grad_out.new_empty(0, dtype=dtype)
    return grad_out.new_empty(grad_out.shape), bias.new_empty(bias.shape)


_backward_op = define(
    "bias_dropout_residual_backward(Tensor grad_out, Tensor? bias, Tensor? seed, *, float p,"
    " bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_bias)",
    _LIBRARIES,
    fake=_backward_fake,
)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    x, bias, _, seed = inputs
    ctx.save_for_backward(bias, seed)
    ctx.p, ctx.x_dtype = keyword_only_inputs["p"], x.dtype


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_bias, needs_residual, _ = ctx.needs_input_grad
    of_residual = grad_out if needs_residual else None
    if not needs_x and not needs_bias:
        return None, None, of_residual, None
    grad_x, grad_bias = _backward_op(
        grad_out, *ctx.saved_tensors, p=ctx.p, needs_grad_bias=needs_bias
    )
    return grad_x.to(ctx.x_dtype), grad_bias if needs_bias else None, of_residual, None


_op = define(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, *, float p)"
    " -> Tensor",
    _LIBRARIES,
    fake=lambda x, bias, residual, seed, *, p: (x if residual is None else residual).new_empty(
        x.shape
    ),
    backward=_backward,
    setup_context=_save,
)
kernels = bare(_op), bare(_backward_op)  # for who has no graph of autograd's


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Return dropout(x + bias) + residual, in one pass over memory.

    Which elements are dropped is a hash of the seed and of the element's number, counted through
    the whole of x: the same on the CPU and on CUDA, and for every split. The mask is made again for
    the gradients, never stored; nothing is kept for them but bias and seed. A dropped element gives
    the residual, whatever x has there, NaN too, and gets a gradient of 0; others are multiplied by
    1 / (1 - p). On the CPU the bits are the same with any number of threads and any instruction
    set; on CUDA, in every run. Arithmetic is in float32 and rounds once, at the end. There is no
    gradient of a gradient.

    Args:
        x: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one piece
            each, at equal distances, are read as they lie; other layouts are copied first.
        bias: (n,), any of these dtypes; None for zeros.
        residual: the shape of x, any of these dtypes; None for zeros.
        p: the part that is dropped, from 0 to 1; it is rounded to a multiple of 2^-32.
        training: False: nothing is dropped.
        seed: int64, of one element, where x is: the same one drops the same elements. None draws
            one by torch's generator of the device, once a call, so activation checkpointing
            drops the same elements again, and a CUDA graph others at each replay.

    Returns:
        The shape of x, contiguous; of the dtype of residual if there is one, else of x.

    See: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
    2014. ``bias_dropout_residual_ref`` is the same in float64.
    """
    seed, p = seed_of("bias_dropout_residual", x, p, training, seed)
    out: Tensor = _op(x, bias, residual, seed, p=p)
    return out


def bias_dropout_residual_ref(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Do what bias_dropout_residual does, in float64 and plain torch: its definition, for tests."""
    seed, p = seed_of("bias_dropout_residual", x, p, training, seed)
    kept = kept_ref(seed, p, x)
    total = x.double() if bias is None else x.double() + bias.double()
    dropped = (total * kept).masked_fill(kept == 0, 0)
    return dropped if residual is None else dropped + residual.double()
