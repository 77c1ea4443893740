"""Attention of tokens to those of the blocks that a layout names, with gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import check_numbers, define

_LIBRARIES = {"cpu": "cpu_sparse_attn", "cuda": "fused_sparse_attn"}
_INPUTS = "Tensor layout, Tensor? key_padding_mask, Tensor? attn_mask, Tensor? rpe"
_OPTIONS = "*, int block, float scale, bool causal"


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Any,
    needs_q: bool,
    needs_kv: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needed = ((q, needs_q), (k, needs_kv), (v, needs_kv))
    grad_q, grad_k, grad_v = (t.new_empty(t.shape if needs else (0,)) for t, needs in needed)
    return grad_q, grad_k, grad_v


_backward_op = define(
    "block_sparse_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k,"
    f" Tensor v, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}, bool needs_q, bool needs_kv)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    _LIBRARIES,
    fake=_backward_fake,
)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.options = dict(keyword_only_inputs)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    q, k, v, out, lse, *others = ctx.saved_tensors
    grads = _backward_op(
        torch.zeros_like(out) if grad_out is None else grad_out,
        grad_lse,
        *(q, k, v, out, lse, *others),
        **ctx.options,
        needs_q=needs_q,
        needs_kv=needs_k or needs_v,
    )
    needed = (needs_q, needs_k, needs_v)
    wanted = (g if needs else None for g, needs in zip(grads, needed, strict=True))
    return *wanted, None, None, None, None


_op = define(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_INPUTS}, {_OPTIONS})"
    " -> (Tensor out, Tensor lse)",
    _LIBRARIES,
    fake=lambda q, *others, **options: (
        q.new_empty(q.shape),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
    ),
    backward=_backward,
    setup_context=_save,
    without_gradient=("layout", "key_padding_mask", "attn_mask", "rpe"),
)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    block: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rpe: Tensor | None = None,
) -> Tensor:
    """Let tokens attend to the tokens of those blocks that the layout names, and to no others.

    Token i of a head sees token j where the layout of the head is not 0 at [i // block, j // block]
    and no mask leaves it out. Its scores are q @ k * scale, then what rpe and floating masks add.
    What is left out has no part in a result or a gradient, whatever q, k, v or the gradient of
    the result have there, NaN included; -inf in rpe or a floating mask leaves out, as does a score
    that is -inf itself. A token that sees nothing has a result of zeros and gradients of zeros.

    Work and time go with the blocks that are named. No array of scores, of either direction, is in
    memory, nor a mask that was expanded; the logarithms of the sums, one float32 for each token and
    head, and the result are kept for the gradients. There is no gradient of a gradient.

    A token has the same bits in any batch and with any other heads; gradients too. On the CPU
    they also do not depend on the number of threads or the instruction set, and arithmetic is in
    float32. On CUDA it is so where q, k and v are not of one dtype of 16 bits, where head_dim is
    over 128 or no multiple of 8, and where scale is not 1e-30 to 1e30. Elsewhere tensor cores
    multiply: weights, and gradients of scores, are rounded to the dtype between two products.
    What is not finite there is done again in float32: a token that sees no NaN or infinity, but
    shares blocks with one that is left out, may have other last bits than without it. The host
    looks at no tensor, and a graph can capture a call.

    Args:
        q: (batch, heads, tokens, head_dim), float32, bfloat16 or float16, on the CPU or on CUDA,
            any strides; any number of tokens, head_dim 1 to 256.
        k: (batch, kv_heads, tokens, head_dim), any of these dtypes. Heads of q are a multiple of
            kv_heads; neighbours share one.
        v: the shape of k, any of these dtypes.
        layout: (heads or 1, n, n) with n = ceil(tokens / block), bool, uint8, int32 or int64, on
            the device of q: what is not 0 names a block. Of a last block that is not whole, what is
            beyond the tokens is not there.
        block: tokens in a block: 16, 32, 64 or 128.
        scale: finite; None for 1 / sqrt(head_dim).
        causal: no token sees one behind it. Blocks of which it leaves out all cost nothing.
        key_padding_mask: None, or (batch, tokens), of keys: bool, which are kept where it is True;
            or float32, bfloat16 or float16, added. SparseSelfAttention's of (batch, 1, 1, tokens)
            has the dimensions of 1 taken out first.
        attn_mask: None, or a shape that can be broadcast to (batch, heads, tokens, tokens), such
            as (tokens, tokens), with any strides; bool or floating, likewise.
        rpe: None, or a shape that can be broadcast to the same, with any strides; float32,
            bfloat16 or float16, added: biases of relative positions.

    Returns:
        The shape and dtype of q, contiguous.

    Raises:
        RuntimeError: layout, a mask or rpe requires a gradient: there is none for it.

    See: Dao, "FlashAttention-2", 2023, section 3.1; Child et al., "Generating Long Sequences with
    Sparse Transformers", 2019, for layouts. ``block_sparse_attention_ref`` is the same in float64.
    """
    if type(q) is not Tensor:
        check_kinds("block_sparse_attention", q=(q, Tensor))
    if scale is None:
        scale = _scale_of(q)
    elif type(scale) is not float:
        check_numbers("block_sparse_attention", scale=scale)
    if type(block) is not int:
        check_numbers("block_sparse_attention", True, block=block)
    masks = key_padding_mask, attn_mask, rpe
    out: Tensor = _op(q, k, v, layout, *masks, block=block, scale=scale, causal=causal)[0]
    return out


def _scale_of(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1]) if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def block_sparse_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    block: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rpe: Tensor | None = None,
) -> Tensor:
    """Do what block_sparse_attention does, in float64 and plain torch: its definition, for tests.

    It has all scores in memory, and takes finite q, k and v.
    """
    tokens = q.shape[2]
    keys, values = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    score = q.double() @ keys.mT * (_scale_of(q) if scale is None else scale)
    seen = (layout != 0).repeat_interleave(block, -1).repeat_interleave(block, -2)
    left_out = ~seen[:, :tokens, :tokens]
    if causal:
        left_out = left_out | torch.ones_like(left_out[0]).triu(1)
    of_keys = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    for mask in (rpe, of_keys, attn_mask):
        if mask is None:
            continue
        if mask.is_floating_point():
            left_out = left_out | (mask == -torch.inf)
            score = score + mask.double()
        else:
            left_out = left_out | ~mask
    score = score.masked_fill(left_out, -torch.inf)
    nothing = (score == -torch.inf).all(-1, keepdim=True)
    weights = score.masked_fill(nothing, 0).softmax(-1).masked_fill(left_out | nothing, 0)
    return weights @ values
