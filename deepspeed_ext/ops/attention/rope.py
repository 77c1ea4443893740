"""Rotary position embedding of queries and keys, in place or not."""

from typing import Any, overload

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_on_tensors, check_numbers, define

_LIBRARIES = {"cpu": "cpu_rope", "cuda": "fused_rope"}
_OPTIONS = "bool interleaved, bool heads_first, float scale"


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs[-2:])
    ctx.options = keyword_only_inputs


def _turn_back(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Turn gradients by the negative angles: rope again, so gradients of gradients work too."""
    positions, frequencies = ctx.saved_tensors
    options = ctx.options | {"negative": not ctx.options["negative"]}
    wanted = [grad for grad in grads if grad is not None]
    if len(wanted) == 2:
        return *_pair_op(*wanted, positions, frequencies, **options), None, None
    turned = (g if g is None else _op(g, positions, frequencies, **options) for g in grads)
    return *turned, None, None


_op = define(
    f"rope(Tensor q, Tensor positions, Tensor frequencies, *, {_OPTIONS}, bool negative) -> Tensor",
    _LIBRARIES,
    fake=lambda q, *others, **options: q.new_empty(q.shape),
    backward=_turn_back,
    setup_context=_save,
    without_gradient=("frequencies",),
)
_pair_op = define(
    f"rope.pair(Tensor q, Tensor k, Tensor positions, Tensor frequencies, *, {_OPTIONS},"
    " bool negative) -> (Tensor q_out, Tensor k_out)",
    _LIBRARIES,
    fake=lambda q, k, *others, **options: (q.new_empty(q.shape), k.new_empty(k.shape)),
    backward=_turn_back,
    setup_context=_save,
    without_gradient=("frequencies",),
)
_in_place_op = define(
    "rope_(Tensor(a!) q, Tensor(b!)? k, Tensor positions, Tensor frequencies, *,"
    f" {_OPTIONS}) -> ()",
    _LIBRARIES,
)


@overload
def rope(
    q: Tensor,
    k: None,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    heads_first: bool = False,
    scale: float = 1.0,
) -> Tensor: ...


@overload
def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    heads_first: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]: ...


def rope(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    heads_first: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn pairs of elements of every head by position times frequency, in q and k at once.

    Pair j of a token at position p turns by p * frequencies[j]; the second of a pair is ahead of
    the first by a quarter turn. Angles are counted as integers: their cosines and sines are right
    to 3 x 2^-24 + p * frequencies[j] * 2^-52 at any position p, if frequencies are in float64.

    A token has the same bits alone, in any batch and at any place in it; on the CPU also with any
    number of threads and any instruction set; on CUDA in every run. Arithmetic is in float32.
    Gradients turn the other way, and have gradients of their own. Nothing is kept for them but
    positions and frequencies.

    Args:
        q: (..., tokens, heads, width), float32, bfloat16 or float16, on the CPU or on CUDA. Read as
            it lies where heads lie in one piece each: slices of one projection, or with heads
            before tokens, are no copies. Other layouts are copied first.
        k: None, or the shape of q but for the number of heads; any of these dtypes.
        positions: (tokens,), or (..., tokens) as q begins, int64 or int32; may be negative.
        frequencies: (pairs,), radians per position, float64 or float32, with 2 * pairs <= width:
            what comes behind the first 2 * pairs elements of a head is copied. See
            ``rope_frequencies`` and its kin. A float32 frequency is off by 2^-25, which at position
            1,000,000 is 0.03 radians.
        interleaved: whether pair j is elements 2 j and 2 j + 1 (GPT-J), else j and pairs + j
            (NeoX, Llama).
        heads_first: whether q and k are (..., heads, tokens, width).
        scale: of what turns, as YaRN wants.

    Returns:
        The shape of q, contiguous, of its dtype; with k a tuple of both.

    Raises:
        RuntimeError: frequencies require a gradient.

    See: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equations
    15 and 34. ``rope_ref`` is the same in float64.
    """
    if type(scale) is not float:
        check_numbers("rope", scale=scale)
    options = dict(interleaved=interleaved, heads_first=heads_first, scale=scale, negative=False)
    if k is None:
        out: Tensor = _op(q, positions, frequencies, **options)
        return out
    both: tuple[Tensor, Tensor] = _pair_op(q, k, positions, frequencies, **options)
    return both


def rope_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    heads_first: bool = False,
    scale: float = 1.0,
) -> None:
    """Do what rope does, in place: for inference, as there is no gradient.

    Args:
        q: as there, and written. No copy can be made: elements of a head lie side by side, and
            batches at one distance from each other.
        k: None, or as there, and written likewise; apart from q.
        positions: as there.
        frequencies: as there.
        interleaved: as there.
        heads_first: as there.
        scale: as there.

    Raises:
        RuntimeError: a gradient, or a tangent, would be lost.

    See: ``rope``.
    """
    if type(scale) is not float:
        check_numbers("rope_", scale=scale)
    options = dict(interleaved=interleaved, heads_first=heads_first, scale=scale)
    call_on_tensors(_in_place_op, q, k, positions, frequencies, **options)
    if not torch.compiler.is_compiling():  # a native op does not count its writes
        torch.autograd.graph.increment_version([q] if k is None else [q, k])


def rope_ref(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    heads_first: bool = False,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what rope does, in float64 and plain torch: its definition, for tests."""
    angles = positions.double().unsqueeze(-1) * frequencies.double()
    angles = angles.unsqueeze(-3 if heads_first else -2)  # for all heads
    pairs = frequencies.numel()

    def turned(x: Tensor) -> Tensor:
        turns, rest = x.double().split([2 * pairs, x.shape[-1] - 2 * pairs], -1)
        grid = turns.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
        first, second = grid.unbind(-1 if interleaved else -2)
        both = (
            scale * (first * angles.cos() - second * angles.sin()),
            scale * (second * angles.cos() + first * angles.sin()),
        )
        return torch.cat([torch.stack(both, -1 if interleaved else -2).flatten(-2), rest], -1)

    return turned(q) if k is None else (turned(q), turned(k))
