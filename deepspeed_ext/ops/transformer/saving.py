"""Parts of a layer that keep less for their gradients, and work it out again."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops.elementwise.bias_activation import bias_activation, bias_activation_gradients
from deepspeed_ext.ops.norm.layer_norm import layer_norm, layer_norm_gradients


class _InvertibleNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out = layer_norm(x, weight, bias, eps=eps)
        deviation = (torch.var(x.float(), -1, correction=0, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(out, deviation, weight, bias)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, deviation, weight, bias = ctx.saved_tensors
        x = (out.float() - bias.float()).div_(weight.float()).mul_(deviation)
        grad, of_weight, of_bias = layer_norm_gradients(grads[0], x, weight, bias, ctx.eps)
        return grad.to(out.dtype), of_weight, of_bias, None


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias, weight)
        activated = bias_activation(x, bias, activation="gelu_tanh")
        return torch.nn.functional.linear(activated, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        activated = bias_activation(x, bias, activation="gelu_tanh").view(-1, weight.shape[1])
        of_weight = (grad.t() @ activated).to(weight.dtype)
        del activated
        of_activated = (grad @ weight.to(x.dtype)).view(x.shape)
        of_x, of_bias = bias_activation_gradients(of_activated, x, bias, "gelu_tanh")
        return of_x, of_bias, of_weight


def invertible_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return a layer norm that keeps its result, which what follows keeps too, and not its input.

    The deviations of a row from its mean are those of the result without bias and weight, times
    what the row was divided by, of which there is one number for each row. The gradient depends on
    no more. Where a weight is 0 its column is lost, and gradients are NaN.
    """
    out: Tensor = _InvertibleNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out


def activated_linear(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """Return gelu_tanh(x + bias) times a weight; x alone is kept, and the vectors."""
    out: Tensor = _ActivatedLinear.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    return out
