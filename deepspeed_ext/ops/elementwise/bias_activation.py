"""Activations with or without a bias, as between the matrices of a feed-forward block."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._activations import number_of, reference
from deepspeed_ext.ops._library import bare, define

_LIBRARIES = {"cpu": "cpu_bias_activation", "cuda": "fused_bias_activation"}


def _backward_fake(
    grad_out: Tensor, x: Tensor, bias: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    if bias is None or not options["needs_grad_bias"]:
        dtype = torch.float32 if bias is None else bias.dtype
        return x.new_empty(x.shape), x.new_empty(0, dtype=dtype)
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


_backward_op = define(
    "bias_activation_backward(Tensor grad_out, Tensor x, Tensor? bias, *, int activation,"
    " bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_bias)",
    _LIBRARIES,
    fake=_backward_fake,
)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.activation = keyword_only_inputs["activation"]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None]:
    needed = ctx.needs_input_grad[1]
    grad_x, grad_bias = _backward_op(
        grad_out, *ctx.saved_tensors, activation=ctx.activation, needs_grad_bias=needed
    )
    return grad_x, grad_bias if needed else None


_op = define(
    "bias_activation(Tensor x, Tensor? bias, *, int activation) -> Tensor",
    _LIBRARIES,
    fake=lambda x, bias, *, activation: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_save,
)
kernels = bare(_op), bare(_backward_op)  # for who has no graph of autograd's


def bias_activation(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """Return activation(x + bias), in one pass over memory.

    On the CPU the bits are the same with any number of threads and any instruction set; on CUDA, in
    every run. Both gradients come from one pass; nothing is kept for them but x and bias. There is
    no gradient of a gradient. Arithmetic is in float32; x + bias is not rounded in between. As in
    torch, -inf gives NaN, but for "relu".

    Args:
        x: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one piece
            each, at equal distances, are read as they lie; other layouts are copied first.
        bias: (n,), any of these dtypes; None for zeros.
        activation: "gelu": x times the normal distribution at x, also where that is tiny, unlike
            1 + erf. "gelu_tanh": its approximation by tanh, as in GPT-2. "gelu_quick": x times
            sigmoid(1.702 x), as in CLIP. "relu". "silu": x times sigmoid(x).

    Returns:
        The shape of x, contiguous, of its dtype.

    See: Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    ``bias_activation_ref`` is the same in float64.
    """
    number = number_of("bias_activation", activation)
    out: Tensor = _op(x, bias, activation=number)
    return out


def bias_activation_ref(
    x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu"
) -> Tensor:
    """Do what bias_activation does, in float64 and plain torch: its definition, for tests."""
    return reference(activation, x.double() if bias is None else x.double() + bias.double())
