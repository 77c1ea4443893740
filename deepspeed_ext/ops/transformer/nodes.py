"""What a layer does ahead of its attention and behind it: a node of autograd's graph each.

A layer of some 20 nodes spends more time between kernels than in them. Here kernels are called with
nothing recorded, and backward calls those of the gradients. The gradient of a residual is added by
the norm's kernel where there is a norm, so hidden states pass through the first node.
"""

from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops.elementwise.bias_activation import bias_activation, bias_activation_gradients
from deepspeed_ext.ops.elementwise.bias_dropout_residual import (
    bias_dropout_residual,
    bias_dropout_residual_gradients,
)
from deepspeed_ext.ops.norm.layer_norm import layer_norm, layer_norm_gradients

Grads = tuple[Tensor | None, ...]
_ACTIVATION = "gelu_tanh"


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


_NO_GRADS = (None,) * len(Options._fields)


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


def _final(grads: Grads) -> Grads:
    """Return gradients such that none of theirs vanishes, if there is to be a graph of them."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    anchor = torch.zeros((), requires_grad=True)
    refusing: Grads = _Refusal.apply(anchor, *grads)  # type: ignore[no-untyped-call]
    return refusing


def _norm(x: Tensor, weight: Tensor, bias: Tensor, options: Options) -> tuple[Tensor, _Norm]:
    """Return the result of a norm, and what its gradients need.

    The deviations of a row from its mean are those of the result without bias and weight, times
    what the row was divided by, of which there is one number for each row. The gradient depends on
    no more. Where a weight is 0 its column is lost, and gradients are NaN.
    """
    out = layer_norm(x, weight, bias, eps=options.eps)
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
    grad, *of_vectors = layer_norm_gradients(grad_out, x, weight, bias, eps, grad_sum=grad_sum)
    return grad if grad.dtype == dtype else grad.to(dtype), of_vectors[0], of_vectors[1]


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
    of_weight = None
    if needs_weight:
        of_weight = grad.t() @ (x if x.dtype == grad.dtype else x.to(grad.dtype))
        of_weight = of_weight if of_weight.dtype == weight.dtype else of_weight.to(weight.dtype)
    return grad @ (weight if weight.dtype == grad.dtype else weight.to(grad.dtype)), of_weight


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        *values: Any,
    ) -> tuple[Tensor, ...]:
        options = Options(*values)
        batch, length, hidden = x.shape
        normed, norm = x.reshape(-1, hidden), _Norm()
        if norm_weight is not None and norm_bias is not None:
            normed, norm = _norm(normed, norm_weight, norm_bias, options)
        joined = _linear(normed, weight, bias)
        ctx.save_for_backward(*norm, normed, weight, bias)
        ctx.eps = options.eps
        heads = joined.view(batch, length, 3, options.heads, hidden // options.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *of_norm, normed, weight, bias = ctx.saved_tensors
        of_sum, norm, needs = grads[3], _Norm(*of_norm), ctx.needs_input_grad
        with torch.no_grad():
            grad = torch.stack([of_part.transpose(1, 2) for of_part in grads[:3]], 2)
            grad = grad.view(normed.shape[0], weight.shape[0])
            of_bias = grad.sum(0, dtype=bias.dtype) if needs[4] else None
            of_x, of_weight = _linear_gradients(grad, normed, weight, needs[3])
            vectors: Grads = None, None
            if norm.kept is None:
                of_x = of_x + of_sum.view_as(of_x)
            else:
                of_x, *vectors = _norm_gradients(norm, of_x, of_sum.view_as(of_x), ctx.eps)
        return _final((of_x.view_as(of_sum), *vectors, of_weight, of_bias, *_NO_GRADS))


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        *values: Any,
    ) -> Tensor:
        options = Options(*values)
        p, hidden = options.p, residual.shape[-1]
        joined = attended.transpose(1, 2).reshape(-1, hidden)
        rows = residual.reshape(-1, hidden)
        total = bias_dropout_residual(_linear(joined, attn_ow), attn_ob, rows, p, seed=seed)
        normed, norm = _norm(total, attn_nw, attn_nb, options)
        inner = _linear(normed, inter_w)
        activated = bias_activation(inner, inter_b, activation=_ACTIVATION)
        product, last_norm = _linear(activated, output_w), _Norm()
        if norm_weight is None or norm_bias is None:
            out = bias_dropout_residual(product, output_b, total, p, seed=last_seed)
        else:
            last = bias_dropout_residual(product, output_b, normed, p, seed=last_seed)
            out, last_norm = _norm(last, norm_weight, norm_bias, options)
        ctx.save_for_backward(
            *(joined, normed, inner, None if options.activates_again else activated),
            *(seed, last_seed, attn_ow, attn_ob, inter_w, inter_b, output_w, output_b),
            *(*norm, *last_norm),
        )
        ctx.options, ctx.shape = options, attended.shape
        return out.view(residual.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        joined, normed, inner, activated, *others = ctx.saved_tensors
        seed, last_seed, attn_ow, attn_ob, inter_w, inter_b, output_w, output_b, *norms = others
        norm, last_norm = _Norm(*norms[:4]), _Norm(*norms[4:])
        (_, p, eps, *_), needs = ctx.options, ctx.needs_input_grad
        with torch.no_grad():
            of_sum = grads[0].reshape(normed.shape)
            vectors: Grads = None, None
            if last_norm.kept is not None:
                of_sum, *vectors = _norm_gradients(last_norm, of_sum, None, eps)
            grad, of_output_b = bias_dropout_residual_gradients(of_sum, output_b, last_seed, p)
            grad = grad if grad.dtype == inner.dtype else grad.to(inner.dtype)
            if activated is None:
                activated = bias_activation(inner, inter_b, activation=_ACTIVATION)
            grad, of_output_w = _linear_gradients(grad, activated, output_w, needs[10])
            del activated
            grad, of_inter_b = bias_activation_gradients(grad, inner, inter_b, _ACTIVATION)
            grad, of_inter_w = _linear_gradients(grad, normed, inter_w, needs[8])
            if last_norm.kept is None:  # the residual is what the norm was given
                of_sum, *of_norm = _norm_gradients(norm, grad, of_sum, eps)
            else:
                of_sum, *of_norm = _norm_gradients(norm, grad + of_sum, None, eps)
            grad, of_attn_ob = bias_dropout_residual_gradients(of_sum, attn_ob, seed, p)
            grad = grad if grad.dtype == joined.dtype else grad.to(joined.dtype)
            grad, of_attn_ow = _linear_gradients(grad, joined, attn_ow, needs[4])
            batch, heads, length, size = ctx.shape
            of_attended = grad.view(batch, length, heads, size).transpose(1, 2)
        return _final(
            (of_attended, of_sum.view(grads[0].shape), None, None, of_attn_ow, of_attn_ob)
            + (*of_norm, of_inter_w, of_inter_b, of_output_w, of_output_b, *vectors, *_NO_GRADS)
        )


def ahead_of_attention(
    x: Tensor, norm: tuple[Tensor | None, Tensor | None], weight: Tensor, bias: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v of hidden states, and these, for the sum behind the attention.

    Args:
        x: (batch, length, hidden).
        norm: weight and bias of the norm ahead of the product, if there is one.
        weight: of q, k and v.
        bias: likewise.
        o: those of the layer.
    """
    made: tuple[Tensor, Tensor, Tensor, Tensor]
    made = _Ahead.apply(x, *norm, weight, bias, *o)  # type: ignore[no-untyped-call]
    return made


def behind_attention(
    attended: Tensor,
    residual: Tensor,
    seeds: tuple[Tensor | None, Tensor | None],
    weights: tuple[Tensor, ...],
    norm: tuple[Tensor | None, Tensor | None],
    o: Options,
) -> Tensor:
    """Return what a layer makes of its attention's result.

    Args:
        attended: (batch, heads, length, head size).
        residual: (batch, length, hidden), of the first sum.
        seeds: of the attention's output and the layer's.
        weights: each with its bias: of the attention's output, the norm, the two products.
        norm: weight and bias of the norm behind the second sum, if there is one; else its residual
            is the first sum, and not what the norm made of it.
        o: those of the layer.
    """
    made: Tensor = _Behind.apply(  # type: ignore[no-untyped-call]
        attended, residual, *seeds, *weights, *norm, *o
    )
    return made
