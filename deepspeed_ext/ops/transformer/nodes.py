"""What a layer does ahead of its attention and behind it: a node of autograd's graph each.

A layer of some 20 nodes spends more time between kernels than in them. Here kernels are called with
nothing recorded, and backward calls those of the gradients. The gradient of a residual is added by
the norm's kernel where there is a norm, so hidden states pass through the first node.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops._activations import number_of
from deepspeed_ext.ops.elementwise.bias_activation import kernels as activation_kernels
from deepspeed_ext.ops.elementwise.bias_dropout_residual import kernels as sum_kernels
from deepspeed_ext.ops.norm.layer_norm import kernels as norm_kernels
from deepspeed_ext.torch_internals.dispatch import below_autograd

Grads = tuple[Tensor | None, ...]
_norm_op, _norm_backward_op = norm_kernels
_sum_op, _sum_backward_op = sum_kernels  # of dropped and biased products and residuals
_activation_op, _activation_backward_op = activation_kernels
_GELU = number_of("DeepSpeedTransformerLayer", "gelu_tanh")


class Options(NamedTuple):
    """What a call of a layer is made with, beside tensors.

    Attributes:
        heads: of the attention.
        p: the part of outputs that is dropped, 0 without seeds.
        eps: of norms.
        is_invertible: norms keep what they returned, and not what they were given.
        activates_again: backward works out the activation's result again.
    """

    heads: int
    p: float
    eps: float
    is_invertible: bool
    activates_again: bool


class _Norm(NamedTuple):
    """What the gradients of a norm need; all None where there is no norm."""

    kept: Tensor | None = None  # what it was given or, with deviations, returned
    weight: Tensor | None = None
    bias: Tensor | None = None
    deviation: Tensor | None = None


class _Refusal(torch.autograd.Function):
    """Gradients, through which none can pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor | None) -> Grads:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "DeepSpeedTransformerLayer: the gradient of a gradient is wanted, expected none, as the"
            " layer has none; for gradients of gradients use plain torch"
        )


def _unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ops go past autograd; what is compiled has none anyway."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else below_autograd()


def _once(gradients: Callable[..., Grads], ctx: Any, grads: tuple[Tensor, ...]) -> Grads:
    """Return gradients such that none of theirs vanishes, where there is to be a graph of them."""
    saved = ctx.saved_tensors  # first, as checkpointing runs the layer again here
    with _unrecorded():
        made = gradients(ctx, saved, *grads)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return made
    anchor = torch.zeros((), requires_grad=True)
    refusing: Grads = _Refusal.apply(anchor, *made)  # type: ignore[no-untyped-call]
    return refusing


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # which takes longer to find out


def _norm(x: Tensor, weight: Tensor, bias: Tensor, options: Options) -> tuple[Tensor, _Norm]:
    """Return the result of a norm, and what its gradients need.

    The deviations of a row from its mean are those of the result without bias and weight, times
    what the row was divided by, of which there is one number for each row. The gradient depends on
    no more. Where a weight is 0 its column is lost, and gradients are NaN.
    """
    out = _norm_op(x, weight, bias, eps=options.eps, weight_offset=0.0)
    if not options.is_invertible:
        return out, _Norm(x, weight, bias)
    deviation = (torch.var(x.float(), -1, correction=0, keepdim=True) + options.eps).sqrt()
    return out, _Norm(out, weight, bias, deviation)


def _norm_gradients(
    norm: _Norm, grad_out: Tensor, grad_sum: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of what a norm was given, with what is added to it, weight and bias."""
    x, weight, bias, deviation = norm
    assert x is not None and weight is not None and bias is not None
    dtype = x.dtype
    if deviation is not None:
        x = (x.float() - bias.float()).div_(weight.float()).mul_(deviation)
    grad, of_weight, of_bias, _ = _norm_backward_op(
        *(grad_out, grad_sum, x, weight, bias, None),
        eps=eps,
        weight_offset=0.0,
        needs_grad_weight=True,
    )
    return _to(grad, dtype), of_weight, of_bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product; autocast's casts would be kept for others, who want their gradients."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return F.linear(x, weight, bias)


def _linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a product's two factors."""
    dtype, of_weight = grad.dtype, None
    if needs_weight:
        of_weight = _to(torch.mm(grad.t(), _to(x, dtype)), weight.dtype)
    return torch.mm(grad, _to(weight, dtype)), of_weight


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        batch, length, hidden = x.shape
        with _unrecorded():
            normed, norm = x.reshape(-1, hidden), _Norm()
            if norm_weight is not None and norm_bias is not None:
                normed, norm = _norm(normed, norm_weight, norm_bias, options)
            joined = _linear(normed, weight, bias)
            heads = joined.view(batch, length, 3, options.heads, hidden // options.heads)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        ctx.save_for_backward(*norm, normed, weight, bias)
        ctx.eps = options.eps
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return _once(_Ahead.gradients, ctx, grads)

    @staticmethod
    def gradients(
        ctx: Any,
        saved: tuple[Any, ...],
        of_q: Tensor,
        of_k: Tensor,
        of_v: Tensor,
        of_residual: Tensor,
    ) -> Grads:
        *kept, normed, weight, bias = saved
        norm, needs = _Norm(*kept), ctx.needs_input_grad
        of_sum = of_residual.reshape(normed.shape)
        parts = of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)
        grad = torch.stack(parts, 2).view(normed.shape[0], weight.shape[0])
        of_bias = grad.sum(0, dtype=bias.dtype) if needs[5] else None
        of_x, of_weight = _linear_gradients(grad, normed, weight, needs[4])
        of_norm: list[Tensor | None] = [None, None]
        if norm.kept is None:
            of_x = of_x + of_sum
        else:
            of_x, *of_norm = _norm_gradients(norm, of_x, of_sum, ctx.eps)
        return None, of_x.view(of_residual.shape), *of_norm, of_weight, of_bias


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        attended: Tensor,
        residual: Tensor,
        seed: Tensor | None,
        last_seed: Tensor | None,
        attn_ow: Tensor,
        attn_ob: Tensor,
        attn_nw: Tensor,
        attn_nb: Tensor,
        inter_w: Tensor,
        inter_b: Tensor,
        output_w: Tensor,
        output_b: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> Tensor:
        p, hidden = options.p, residual.shape[-1]
        out: Tensor
        with _unrecorded():
            joined = attended.transpose(1, 2).reshape(-1, hidden)
            rows = residual.reshape(-1, hidden)
            total = _sum_op(_linear(joined, attn_ow), attn_ob, rows, seed, p=p)
            normed, norm = _norm(total, attn_nw, attn_nb, options)
            inner = _linear(normed, inter_w)
            activated = _activation_op(inner, inter_b, activation=_GELU)
            product, last_norm = _linear(activated, output_w), _Norm()
            # The result is no view, which nobody could write to.
            product = product.view(residual.shape)
            if norm_weight is None or norm_bias is None:
                out = _sum_op(product, output_b, total.view(residual.shape), last_seed, p=p)
            else:
                last = _sum_op(product, output_b, normed.view(residual.shape), last_seed, p=p)
                out, last_norm = _norm(last, norm_weight, norm_bias, options)
        ctx.save_for_backward(
            *(joined, normed, inner, None if options.activates_again else activated),
            *(seed, last_seed, attn_ow, attn_ob, inter_w, inter_b, output_w, output_b),
            *(*norm, *last_norm),
        )
        ctx.options, ctx.shape = options, attended.shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return _once(_Behind.gradients, ctx, grads)

    @staticmethod
    def gradients(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor) -> Grads:
        joined, normed, inner, activated, *others = saved
        seed, last_seed, attn_ow, attn_ob, inter_w, inter_b, output_w, output_b, *norms = others
        norm, last_norm = _Norm(*norms[:4]), _Norm(*norms[4:])
        (_, p, eps, *_), needs = ctx.options, ctx.needs_input_grad
        of_sum = grad_out
        vectors: list[Tensor | None] = [None, None]
        if last_norm.kept is not None:
            of_sum, *vectors = _norm_gradients(last_norm, grad_out, None, eps)
        of_sum = of_sum.reshape(normed.shape)
        grad, of_output_b = _sum_backward_op(of_sum, output_b, last_seed, p=p, needs_grad_bias=True)
        if activated is None:
            activated = _activation_op(inner, inter_b, activation=_GELU)
        grad, of_output_w = _linear_gradients(
            _to(grad, inner.dtype), activated, output_w, needs[11]
        )
        del activated
        grad, of_inter_b = _activation_backward_op(
            grad, inner, inter_b, activation=_GELU, needs_grad_bias=True
        )
        grad, of_inter_w = _linear_gradients(grad, normed, inter_w, needs[9])
        if last_norm.kept is None:  # the residual is what the norm was given
            of_sum, *of_norm = _norm_gradients(norm, grad, of_sum, eps)
        else:
            of_sum, *of_norm = _norm_gradients(norm, grad + of_sum, None, eps)
        grad, of_attn_ob = _sum_backward_op(of_sum, attn_ob, seed, p=p, needs_grad_bias=True)
        grad, of_attn_ow = _linear_gradients(_to(grad, joined.dtype), joined, attn_ow, needs[5])
        batch, heads, length, size = ctx.shape
        return (
            *(None, grad.view(batch, length, heads, size).transpose(1, 2)),
            *(of_sum.view(grad_out.shape), None, None, of_attn_ow, of_attn_ob, *of_norm),
            *(of_inter_w, of_inter_b, of_output_w, of_output_b, *vectors),
        )


def ahead_of_attention(
    options: Options,
    x: Tensor,
    norm: tuple[Tensor | None, Tensor | None],
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v of hidden states, and these, for the sum behind the attention.

    Args:
        options: those of the layer.
        x: (batch, length, hidden).
        norm: weight and bias of the norm ahead of the product, if there is one.
        weight: of q, k and v.
        bias: likewise.
    """
    made: tuple[Tensor, Tensor, Tensor, Tensor]
    made = _Ahead.apply(options, x, *norm, weight, bias)  # type: ignore[no-untyped-call]
    return made


def behind_attention(
    options: Options,
    attended: Tensor,
    residual: Tensor,
    seeds: tuple[Tensor | None, Tensor | None],
    weights: tuple[Tensor, ...],
    norm: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return what a layer makes of its attention's result.

    Args:
        options: those of the layer.
        attended: (batch, heads, length, head size).
        residual: (batch, length, hidden), of the first sum.
        seeds: of the attention's output and the layer's.
        weights: each with its bias: of the attention's output, the norm, the two products.
        norm: weight and bias of the norm behind the second sum, if there is one; else its residual
            is the first sum, and not what the norm made of it.
    """
    made: Tensor = _Behind.apply(  # type: ignore[no-untyped-call]
        options, attended, residual, *seeds, *weights, *norm
    )
    return made
