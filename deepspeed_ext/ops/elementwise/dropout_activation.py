"""Dropout of an activation, as within a feed-forward block."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._activations import number_of, reference
from deepspeed_ext.ops._dropout import kept_ref, seed_of
from deepspeed_ext.ops._library import define

_LIBRARIES = {"cpu": "cpu_dropout", "cuda": "fused_dropout"}


def _backward_fake(
    grad_out: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    if bias is None or not options["needs_grad_bias"]:
        dtype = torch.float32 if bias is None else bias.dtype
        return x.new_empty(x.shape), x.new_empty(0, dtype=dtype)
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


_backward_op = define(
    "dropout_activation_backward(Tensor grad_out, Tensor x, Tensor? bias, Tensor? seed, *,"
    " float p, int activation, bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_bias)",
    _LIBRARIES,
    fake=_backward_fake,
)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    needs_bias = ctx.needs_input_grad[1]
    grad_x, grad_bias = _backward_op(
        grad_out, *ctx.saved_tensors, **ctx.options, needs_grad_bias=needs_bias
    )
    return grad_x, grad_bias if needs_bias else None, None


_op = define(
    "dropout_activation(Tensor x, Tensor? bias, Tensor? seed, *, float p, int activation)"
    " -> Tensor",
    _LIBRARIES,
    fake=lambda x, bias, seed, **options: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_save,
)


def dropout_activation(
    x: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    *,
    activation: str = "gelu",
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Return dropout(activation(x + bias)), in one pass over memory.

    The mask, its seed and what holds of bits are those of ``bias_dropout_residual``; what holds of
    activations, and of x + bias, is as ``bias_activation`` says. Both gradients come from one pass;
    nothing is kept for them but x, bias and seed. There is no gradient of a gradient.

    Args:
        x: (..., n), as ``bias_activation`` takes it.
        bias: (n,), any of its dtypes; None for zeros.
        p: the part that is dropped, from 0 to 1.
        activation: one of those that ``bias_activation`` has.
        training: False: nothing is dropped.
        seed: as ``bias_dropout_residual`` takes it.

    Returns:
        The shape of x, contiguous, of its dtype.

    See: there. ``dropout_activation_ref`` is the same in float64.
    """
    number = number_of("dropout_activation", activation)
    seed, p = seed_of("dropout_activation", x, p, training, seed)
    out: Tensor = _op(x, bias, seed, p=p, activation=number)
    return out


def dropout_activation_ref(
    x: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    *,
    activation: str = "gelu",
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Do what dropout_activation does, in float64 and plain torch: its definition, for tests."""
    seed, p = seed_of("dropout_activation", x, p, training, seed)
    kept = kept_ref(seed, p, x)
    total = x.double() if bias is None else x.double() + bias.double()
    return (reference(activation, total) * kept).masked_fill(kept == 0, 0)
