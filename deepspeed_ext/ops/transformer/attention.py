"""Attention of whole sequences with dropout of probabilities, by torch or in blocks of queries."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops._dropout import draw_seeds, kept_ref
from deepspeed_ext.ops._kinds import check_kinds, told_dtype
from deepspeed_ext.ops._library import check_numbers, define
from deepspeed_ext.ops.elementwise.bias_dropout_residual import bias_dropout_residual
from deepspeed_ext.ops.softmax_and_loss.softmax import softmax, softmax_gradient, softmax_ref

_ELEMENTS = 1 << 21  # of probabilities at a time


def _blocks(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield queries, so many at a time as sizes alone say, with what is theirs of a mask."""
    queries = q.shape[-2]
    of_query = max(1, q.shape[:-2].numel() * k.shape[-2])
    count = max(1, _ELEMENTS // of_query)
    for first in range(0, queries, count):
        rows = slice(first, min(first + count, queries))
        is_of_each = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1
        yield rows, mask[..., rows, :] if mask is not None and is_of_each else mask


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return softmax(q @ k.transpose(-2, -1), mask, scale=scale)


def _seed_at(seed: Tensor, first: int) -> Tensor:
    """Return the seed of a block; masks of neighbouring seeds have nothing in common."""
    return seed + first


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor, *, p: float, scale: float
) -> Tensor:
    out = _empty_like_heads(q)
    for rows, of_rows in _blocks(q, k, mask):
        probabilities = _probabilities(q[..., rows, :], k, of_rows, scale)
        dropped = bias_dropout_residual(probabilities, p=p, seed=_seed_at(seed, rows.start))
        out[..., rows, :] = dropped @ v
    return out


def _gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    *,
    p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    for rows, of_rows in _blocks(q, k, mask):
        some, grad = q[..., rows, :], grad_out[..., rows, :]
        here = _seed_at(seed, rows.start)
        probabilities = _probabilities(some, k, of_rows, scale)
        dropped = bias_dropout_residual(probabilities, p=p, seed=here)
        grad_v += dropped.transpose(-2, -1) @ grad
        of_dropped = bias_dropout_residual(grad @ v.transpose(-2, -1), p=p, seed=here)
        of_scores = softmax_gradient(of_dropped, probabilities, scale, causal=False, offset=None)
        grad_q[..., rows, :] = of_scores @ k
        grad_k += of_scores.transpose(-2, -1) @ some
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _empty_like_heads(q: Tensor) -> Tensor:
    """Return an empty tensor whose heads of a token are side by side, as those of q may be."""
    *batch, heads, queries, size = q.shape
    return q.new_empty(*batch, queries, heads, size).transpose(-3, -2)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_op(grad_out, *ctx.saved_tensors, **ctx.options), None, None


_KERNELS = {"cpu": _forward, "cuda": _forward}
_BACKWARD_KERNELS = {"cpu": _gradients, "cuda": _gradients}
_OPTIONS = "Tensor? mask, Tensor seed, *, float p, float scale"
_backward_op = define(
    f"dropout_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, {_OPTIONS})"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    _BACKWARD_KERNELS,
    fake=lambda grad_out, q, k, v, mask, seed, **options: (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
    ),
)
_op = define(
    f"dropout_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor",
    _KERNELS,
    fake=lambda q, k, v, mask, seed, **options: _empty_like_heads(q),
    backward=_backward,
    setup_context=_save,
    without_gradient=("mask",),
)


def dropout_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    p: float,
    seed: Tensor | None = None,
) -> Tensor:
    """Return attention of whole sequences, of whose probabilities some are dropped.

    Scores are scaled by 1 / sqrt(head size). On CUDA, and where nothing is dropped, torch's
    scaled_dot_product_attention does all, with dropout of its own. Torch has no fused form with
    dropout on the CPU: there blocks of queries take their turns, whose probabilities are worked out
    again for the gradients, so no array of all scores is ever kept.

    Args:
        q: (batch, heads, queries, head size), of one dtype with k and v.
        k: (batch, heads, keys, head size), with as many heads.
        v: the shape of k.
        mask: None, or what can be broadcast to the scores: bool, True where a key is seen, or a
            floating one that is added. Without a gradient on the CPU.
        p: the part of probabilities that is dropped, from 0 to 1.
        seed: as ``bias_dropout_residual`` takes it, on the CPU; on CUDA torch draws.

    Returns:
        The shape and dtype of q.
    """
    check_kinds("dropout_attention", q=(q, Tensor), k=(k, Tensor), v=(v, Tensor))
    if type(p) is not float:
        check_numbers("dropout_attention", p=p)
        p = float(p)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_attention: p is {p}, expected a number from 0 to 1")
    _check_shapes(q, k, v, mask)
    if mask is not None:
        mask = mask.view(1, -1) if mask.dim() < 2 else mask  # torch wants rows
        mask = mask.to(q.dtype) if mask.is_floating_point() else mask
    if q.device.type == "cuda" or p == 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    seed = draw_seeds(q.device)[0] if seed is None else seed
    out: Tensor = _op(q, k, v, mask, seed, p=p, scale=float(q.shape[-1] ** -0.5))
    return out


def check_hidden_states(owner: str, x: Tensor, hidden: int) -> None:
    """Raise ValueError unless these are (batch, length, hidden)."""
    if x.dim() != 3 or x.shape[-1] != hidden:
        raise ValueError(
            f"{owner}: hidden_states has shape {list(x.shape)}, expected [batch, length, {hidden}]"
        )


def heads_of(owner: str, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> list[Tensor]:
    """Return q, k and v of each head, of what a layer is given or has made of it.

    Args:
        owner: what an error calls the layer.
        x: (batch, length, hidden).
        weight: (3 hidden, hidden).
        bias: (3 hidden,).
        heads: how many there are.

    Raises:
        ValueError: x has another shape.
    """
    hidden = weight.shape[-1]
    check_hidden_states(owner, x, hidden)
    joined = F.linear(x, weight, bias)
    shape = (*x.shape[:2], heads, hidden // heads)
    return [part.view(shape).transpose(1, 2) for part in joined.split(hidden, -1)]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Refuse what torch would tell of in words of its products."""
    if q.dim() != 4:
        raise ValueError(
            f"dropout_attention: q has shape {list(q.shape)}, expected [batch, heads, queries, head"
            " size]"
        )
    batch, heads, queries, size = q.shape
    if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (batch, heads, size):
        raise ValueError(
            f"dropout_attention: k has shape {list(k.shape)}, expected [{batch}, {heads}, keys,"
            f" {size}]"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"dropout_attention: v has shape {list(v.shape)}, expected {list(k.shape)}"
        )
    for name, other in (("k", k), ("v", v)):
        if other.dtype != q.dtype:
            raise ValueError(
                f"dropout_attention: {name} is {told_dtype(other)}, expected {told_dtype(q)}"
            )
    if mask is None:
        return
    check_kinds("dropout_attention", mask=(mask, Tensor))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"dropout_attention: mask is {told_dtype(mask)}, expected bool, True where a key is"
            " seen, or a floating dtype"
        )
    scores = (batch, heads, queries, k.shape[2])
    fits = zip(reversed(mask.shape), reversed(scores), strict=False)
    if mask.dim() > 4 or any(size not in (1, want) for size, want in fits):
        raise ValueError(
            f"dropout_attention: mask has shape {list(mask.shape)}, expected one that can be"
            f" broadcast to {list(scores)}"
        )


def dropout_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    p: float,
    seed: Tensor | None = None,
) -> Tensor:
    """Do what dropout_attention does on the CPU, in float64 and plain torch, for tests."""
    scores = q.double() @ k.double().transpose(-2, -1)
    probabilities = softmax_ref(scores, mask, scale=q.shape[-1] ** -0.5)
    if p > 0:
        seed = draw_seeds(q.device)[0] if seed is None else seed
        kept = [
            kept_ref(_seed_at(seed, rows.start), p, probabilities[..., rows, :])
            for rows, _ in _blocks(q, k, mask)
        ]
        probabilities = probabilities * torch.cat(kept, -2)
    return probabilities @ v.double()
