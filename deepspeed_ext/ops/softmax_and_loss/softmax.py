"""Softmax along the last dimension, of scores that are scaled, capped, biased and masked first."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import check_numbers, define

_LIBRARIES = {"cpu": "cpu_softmax", "cuda": "fused_softmax"}
_OPTIONS = "*, float scale, float softcap, int before, int after, int? offset"

_softmax_backward_op = define(
    f"softmax_backward(Tensor grad_out, Tensor out, Tensor? x, {_OPTIONS}) -> Tensor",
    _LIBRARIES,
    fake=lambda grad_out, out, x, **options: out.new_empty(out.shape),
)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    x, mask, _ = inputs
    ctx.options = {name: keyword_only_inputs[name] for name in ("before", "after", "offset")}
    ctx.scale, ctx.softcap = keyword_only_inputs["scale"], keyword_only_inputs["softcap"]
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output, x if ctx.softcap > 0 else None)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    out, x = ctx.saved_tensors
    grad_x = grad_mask = None
    if ctx.needs_input_grad[0]:
        grad_x = _softmax_backward_op(
            grad_out, out, x, scale=ctx.scale, softcap=ctx.softcap, **ctx.options
        )
    if ctx.needs_input_grad[1]:  # that of the scores themselves, added up where one mask was many
        shape, dtype = ctx.mask
        grad = _softmax_backward_op(grad_out, out, None, scale=1.0, softcap=0.0, **ctx.options)
        grad_mask = grad.sum_to_size(shape).to(dtype)
    return grad_x, grad_mask, None


_softmax_op = define(
    f"softmax(Tensor x, Tensor? mask, Tensor? alibi_slopes, {_OPTIONS}, bool mask_leaves_out)"
    " -> Tensor",
    _LIBRARIES,
    fake=lambda x, mask, alibi_slopes, **options: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_save,
    without_gradient=("alibi_slopes",),
)


def softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    offset: int | None = None,
) -> Tensor:
    """Return softmax along the last dimension of x, as attention needs it, in one pass over memory.

    The scores of a row are, in this order: x * scale; capped, softcap * tanh(score / softcap);
    with the bias of ALiBi, -slope * |position of the query - position of the key|; with an additive
    mask. What a boolean mask, an additive -inf, causality or the window leave out is exactly 0, and
    so is its gradient, whatever x or the gradient of the result have there. A row of which nothing
    takes part is zeros. A score of -inf gives 0. If a score that takes part is NaN or +inf, as
    where x * scale is no float32, all others that take part in its row are NaN. The gradient is 0
    wherever the result is 0.

    No mask is expanded in memory, and what causality and the window leave out is not read. A row
    has the same bits alone, in any batch and at any place in it; on the CPU also with any number of
    threads, any instruction set, and any columns that are left out behind the last one that takes
    part. Gradients too. Arithmetic is in float32. For the gradient the result is kept, and x if
    there is a softcap. There is no gradient of a gradient. That of a mask which is broadcast, or of
    another dtype than x, is made from one as large as x.

    Args:
        x: (..., queries, keys), or (keys,); float32, bfloat16 or float16, on the CPU or on CUDA, of
            any length. Rows that lie in one piece each, at equal distances, are read as they lie;
            other layouts are copied first.
        mask: None, or a shape that can be broadcast to that of x, with any strides: bool or uint8,
            where what is not 0 takes part, as in torch; or float32, bfloat16 or float16, added to
            the scores, which has a gradient.
        scale: finite; 1 / sqrt(head dimension) for attention.
        softcap: 0 for none, or more than 1e-30.
        alibi_slopes: None, or float32, a shape that can be broadcast to x.shape[:-2]: (heads,).
            Without a gradient.
        causal: no query sees a key at a position after its own.
        window: how many keys before its position and after it a query sees, (-1, -1) for all.
        offset: the position of the first query among the keys; None for keys - queries, so that the
            last query is at the last key. 0 for torch's is_causal.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: alibi_slopes requires a gradient.

    See: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1; Press, Smith & Lewis,
    "Train Short, Test Long", 2022, for ALiBi. ``softmax_ref`` is the same in float64.
    """
    if type(scale) is not float or type(softcap) is not float:
        check_numbers("softmax", scale=scale, softcap=softcap)
    if offset is not None and type(offset) is not int:
        check_numbers("softmax", True, offset=offset)
    before, after = _keys_seen(causal, window)
    out: Tensor = _softmax_op(
        x,
        mask,
        alibi_slopes,
        scale=scale,
        softcap=softcap,
        before=before,
        after=after,
        offset=offset,
        mask_leaves_out=False,
    )
    return out


def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return softmax of x * scale without what the mask leaves out, as Megatron has it.

    Theirs gives what is left out a score of -10000, so that a row of which all is left out becomes
    one of equal probabilities; here it is zeros. Theirs takes 16 to 2,048 keys of bfloat16 or
    float16, by fours; here they are as softmax takes them, as is all that is not said here.

    Args:
        x: (batch, heads, queries, keys), or any other shape.
        mask: None, or bool or uint8, a shape that can be broadcast to that of x, such as (batch, 1,
            queries, keys): what is not 0 is left out, contrary to softmax.
        scale: finite.
    """
    if type(scale) is not float:
        check_numbers("scaled_masked_softmax", scale=scale)
    out: Tensor = _softmax_op(
        x,
        mask,
        None,
        scale=scale,
        softcap=0.0,
        before=-1,
        after=-1,
        offset=None,
        mask_leaves_out=True,
    )
    return out


def scaled_upper_triang_masked_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return softmax of x * scale where a query sees the keys up to its own number, as Megatron.

    Args:
        x: (batch * heads, queries, keys), or any other shape of two dimensions or more; not only
            square, nor only bfloat16 and float16 of up to 2,048 keys. What is above the diagonal is
            not read.
        scale: finite.
    """
    return softmax(x, scale=scale, causal=True, offset=0)


def scaled_masked_softmax_ref(x: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """Do what scaled_masked_softmax does, in float64 and plain torch: its definition, for tests."""
    return softmax_ref(x, None if mask is None else mask == 0, scale=scale)


def scaled_upper_triang_masked_softmax_ref(x: Tensor, scale: float = 1.0) -> Tensor:
    """Do the same for scaled_upper_triang_masked_softmax."""
    return softmax_ref(x, scale=scale, causal=True, offset=0)


def softmax_gradient(
    grad_out: Tensor, out: Tensor, scale: float, *, causal: bool, offset: int | None
) -> Tensor:
    """Return the gradient of x, without a cap, for who has no graph of autograd's."""
    options = dict(scale=scale, softcap=0.0, before=-1, after=0 if causal else -1, offset=offset)
    grad: Tensor = _softmax_backward_op(grad_out, out, None, **options)
    return grad


def _keys_seen(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """Return how many keys a query sees before and after its position; -1 for all."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"softmax: window is {window!r}, expected how many keys are seen before and after a"
            " position, such as (5, 0), or (-1, -1) for all"
        )
    before, after = window
    if type(before) is not int or type(after) is not int:
        check_numbers("softmax", True, **{"window[0]": before, "window[1]": after})
    return before, 0 if causal else after


def softmax_ref(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    offset: int | None = None,
) -> Tensor:
    """Do what softmax does, in float64 and plain torch: its definition, for tests."""
    score = x.double() * scale
    if softcap > 0:
        score = softcap * (score / softcap).tanh()
    queries, keys = x.shape[-2] if x.dim() > 1 else 1, x.shape[-1]
    first = keys - queries if offset is None else offset
    position = torch.arange(queries, device=x.device)[:, None] + first
    ahead = torch.arange(keys, device=x.device) - position  # of the query
    ahead = ahead if x.dim() > 1 else ahead[0]
    if alibi_slopes is not None:
        score = score - alibi_slopes.double()[..., None, None] * ahead.abs()
    before, after = _keys_seen(causal, window)
    left_out = torch.zeros_like(score, dtype=torch.bool)
    if before >= 0:
        left_out = left_out | (ahead < -before)
    if after >= 0:
        left_out = left_out | (ahead > after)
    if mask is not None and mask.is_floating_point():
        left_out = left_out | (mask == -torch.inf)
        score = score + mask.double()
    elif mask is not None:
        left_out = left_out | (mask == 0)
    score = score.masked_fill(left_out, -torch.inf)
    nothing = (score == -torch.inf).all(-1, keepdim=True)
    return score.masked_fill(nothing, 0).softmax(-1).masked_fill(score == -torch.inf, 0)
