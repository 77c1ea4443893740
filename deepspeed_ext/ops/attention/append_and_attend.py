"""A step of one token: keys and values written to a cache, then attention over all that it has."""

import math
from typing import Any

from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import call_on_tensors, check_numbers, define
from deepspeed_ext.ops.attention.decode_attention import decode_attention_ref, fake_attention
from deepspeed_ext.ops.attention.paged_kv import PagedKV, kind_of, libraries_of
from deepspeed_ext.ops.attention.rope_append import (
    WRITTEN,
    cache_of,
    count_writes,
    rope_append_ref_,
)


def _define(kind: str) -> Any:
    name = f"append_and_attend_.{kind}" if kind else "append_and_attend_"
    return define(
        f"{name}(Tensor q, {WRITTEN}, Tensor? alibi_slopes, Tensor? sinks, *, bool interleaved,"
        " float rotation_scale, float eps, float weight_offset, float scale, int window,"
        " float softcap) -> (Tensor out, Tensor lse)",
        libraries_of(kind),
        fake=fake_attention,
    )


_OPS = {kind: _define(kind) for kind in ("", "int8", "fp8")}


def append_and_attend_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    frequencies: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    rotation_scale: float = 1.0,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let one new token of each slot attend, whose key and value are written to the cache.

    The same bits, in cache and results, as ``rope_append_`` and then ``decode_attention``, but q
    stays as it is. On CUDA of compute capability 9.0 and newer it is one kernel where slots have
    few tokens, or there are few of them, and q, k and v are of 16 bits; else those two, with
    memory for a copy of q.

    Args:
        q: (batch, 1, heads, head_dim), float32, bfloat16 or float16; slices of a projection are no
            copies.
        k: (batch, 1, heads of kv, head_dim), of any of these.
        v: likewise.
        kv: a layer of a ``KVCache``; written.
        frequencies: of ``rope_append_``, as all that follows up to
        slots: which ``decode_attention`` has, too.
        counts: likewise: 0 or 1 of each row.
        q_weight: of ``rope_append_``.
        k_weight: likewise.
        eps: likewise.
        weight_offset: likewise.
        interleaved: likewise.
        rotation_scale: its ``scale``.
        scale: of ``decode_attention``, as all that follows.
        alibi_slopes: likewise.
        window: likewise.
        softcap: likewise.
        sinks: likewise.
        return_lse: likewise.

    Returns:
        What ``decode_attention`` does. Where a token has no place, nothing is written and
        ``kv.violations`` becomes 1, and its results are NaN.

    Raises:
        RuntimeError: a gradient, or a tangent, would be lost.

    See: ``rope_append_``, ``decode_attention``. ``append_and_attend_ref_`` is the same in float64.
    """
    if type(q) is not Tensor or type(kv) is not PagedKV:
        check_kinds("append_and_attend_", q=(q, Tensor), kv=(kv, PagedKV))
    numbers = {
        "rotation_scale": rotation_scale,
        "eps": eps,
        "weight_offset": weight_offset,
        "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        "softcap": softcap,
    }
    if set(map(type, numbers.values())) != {float}:
        check_numbers("append_and_attend_", **numbers)
    out, lse = call_on_tensors(
        _OPS[kind_of(kv)],
        *(q, k, v, *cache_of(kv), slots, counts, frequencies, q_weight, k_weight),
        *(alibi_slopes, sinks),
        interleaved=interleaved,
        window=window,
        **numbers,
    )
    count_writes(kv)
    return (out, lse) if return_lse else out


def append_and_attend_ref_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    frequencies: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    rotation_scale: float = 1.0,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what append_and_attend_ does, in float64 and plain torch: its definition, for tests."""
    turned = q.clone()
    rope_append_ref_(
        turned,
        k,
        v,
        kv,
        frequencies,
        slots=slots,
        counts=counts,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        weight_offset=weight_offset,
        interleaved=interleaved,
        scale=rotation_scale,
    )
    return decode_attention_ref(
        turned,
        kv,
        slots=slots,
        counts=counts,
        scale=scale,
        alibi_slopes=alibi_slopes,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
    )
