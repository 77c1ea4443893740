"""Sums with biases of channels that are the last dimension, as between convolutions."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define

_LIBRARIES = {"cpu": "cpu_nhwc_bias_add", "cuda": "fused_nhwc_bias_add"}

_backward_op = define(
    "nhwc_bias_add_backward(Tensor grad_out, Tensor bias) -> Tensor",
    _LIBRARIES,
    fake=lambda grad_out, bias: bias.new_empty(grad_out.shape[-1:]),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, other, other_bias = inputs
    ctx.save_for_backward(bias, other_bias)
    ctx.dtype_of_other = None if other is None else other.dtype


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    _, *needs_rest = ctx.needs_input_grad
    vectors = [*ctx.saved_tensors]
    needs_bias, needs_other, needs_other_bias = needs_rest
    return (
        grad_out,
        _backward_op(grad_out, vectors[0]) if needs_bias else None,
        grad_out.to(ctx.dtype_of_other) if needs_other else None,
        _backward_op(grad_out, vectors[1]) if needs_other_bias else None,
    )


_op = define(
    "nhwc_bias_add(Tensor x, Tensor bias, Tensor? other, Tensor? other_bias) -> Tensor",
    _LIBRARIES,
    fake=lambda x, bias, other, other_bias: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_save,
)


def nhwc_bias_add(
    x: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None
) -> Tensor:
    """Return (x + bias) + (other + other_bias) in one pass over memory.

    A bias is for channels, which are the last in memory: dimension 1 of a 4-D tensor, which must
    be channels_last, else the last dimension. Arithmetic is in float32 and rounds once, at the end.
    The bits are the same with any number of threads and any instruction set; on CUDA, in every run.

    Args:
        x: (batch, channels, height, width) in the channels_last order, or (..., channels) of any
            other number of dimensions; float32, bfloat16 or float16, on the CPU or on CUDA.
        bias: (channels,), any of these dtypes.
        other: None, or the shape of x; of 4 dimensions, channels_last too.
        other_bias: None, or (channels,), if there is `other`.

    Returns:
        The shape of x, of its dtype: of 4 dimensions channels_last, else contiguous.

    See: DeepSpeed, csrc/spatial. ``nhwc_bias_add_ref`` is the same in float64.
    """
    if other is not None and other.shape != x.shape:
        got, want = list(other.shape), list(x.shape)
        raise ValueError(f"nhwc_bias_add: other has shape {got}, expected {want}")
    if x.dim() != 4:
        out: Tensor = _op(x, bias, other, other_bias)
        return out
    last = None if other is None else _channels_last("other", other)
    out = _op(_channels_last("x", x), bias, last, other_bias)
    return out.permute(0, 3, 1, 2)


def _channels_last(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor with its channels as the last dimension; added along any other axis in
    silence they would be where sizes are equal."""
    if not tensor.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(
            f"nhwc_bias_add: {name} has strides {list(tensor.stride())}, expected those of"
            f" channels_last; call {name}.contiguous(memory_format=torch.channels_last)"
        )
    return tensor.permute(0, 2, 3, 1)


def nhwc_bias_add_ref(
    x: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None
) -> Tensor:
    """Do what nhwc_bias_add does, in float64 and plain torch: its definition, for tests."""
    along = (slice(None), None, None) if x.dim() == 4 else ()
    total = x.double() + bias.double()[along]
    total = total if other is None else total + other.double()
    return total if other_bias is None else total + other_bias.double()[along]
