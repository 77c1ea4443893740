"""Queries and keys of new tokens normalised and turned, keys and values written to a cache."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import call_on_tensors, check_numbers, define
from deepspeed_ext.ops.attention.paged_kv import PAGE, PagedKV, kind_of, libraries_of
from deepspeed_ext.ops.attention.rope import rope_ref

# What the schema of an op that writes to a cache has behind q: k and v, `cache_of`, and what it
# does with a token first.
WRITTEN = (
    "Tensor k, Tensor v, Tensor(b!) keys, Tensor(c!) values, Tensor(d!) violations,"
    " Tensor(e!)? key_scales, Tensor(f!)? value_scales, Tensor table, Tensor lengths,"
    " Tensor? slots, Tensor? counts, Tensor? frequencies, Tensor? q_weight, Tensor? k_weight"
)


def _define(kind: str) -> Any:
    name = f"rope_append_.{kind}" if kind else "rope_append_"
    return define(
        f"{name}(Tensor(a!) q, {WRITTEN}, *, bool interleaved, float scale, float eps,"
        " float weight_offset) -> ()",
        libraries_of(kind),
    )


_OPS = {kind: _define(kind) for kind in ("", "int8", "fp8")}


def rope_append_(
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
    scale: float = 1.0,
) -> None:
    """Normalise and turn queries, in place, and keys, and write keys and values to the cache.

    Tokens are the last ones of their slots, which ``KVCache.reserve`` has made room for; a token
    turns by its place in the slot. Arithmetic is in float32, and rounded once. A head has the same
    bits in any batch; on the CPU with any number of threads and any instruction set.

    Codes are elements / scale, rounded to the nearest, with the largest element of a head as 127,
    or 448 for fp8. The scale of a head of which one element is not finite is NaN; one below 2^-100
    is 0.

    Args:
        q: (batch, tokens, heads, head_dim), float32, bfloat16 or float16, any number of tokens;
            written. Its heads lie in one piece each, as those of a slice of a projection do.
        k: likewise, with the heads of kv; read.
        v: likewise.
        kv: a layer of a ``KVCache``; written.
        frequencies: (pairs,), as of ``rope``; None for no rotation.
        slots: (batch,), int32: the slot of each row, or -1 for none; no slot twice. None: row i is
            slot i, and there are as many.
        counts: (batch,), int32: how many of a row's tokens there are, nothing is done with others.
            None: all.
        q_weight: (head_dim,), of an RMS norm over each head of q, before the rotation; None for no
            norm.
        k_weight: likewise of k.
        eps: of the norms.
        weight_offset: added to the weights, as Gemma's models want 1.
        interleaved: as of ``rope``.
        scale: of what turns, as of ``rope``.

    Nothing is written for a token that has no page, or a slot, count or length that cannot be;
    ``kv.violations`` becomes 1, which ``KVCache.check`` looks at.

    Raises:
        RuntimeError: a gradient, or a tangent, would be lost.

    See: ``rope``, ``rms_norm``. ``rope_append_ref_`` is the same in float64.
    """
    if type(kv) is not PagedKV:
        check_kinds("rope_append_", kv=(kv, PagedKV))
    if type(scale) is not float or type(eps) is not float or type(weight_offset) is not float:
        check_numbers("rope_append_", scale=scale, eps=eps, weight_offset=weight_offset)
    call_on_tensors(
        _OPS[kind_of(kv)],
        *(q, k, v, *cache_of(kv), slots, counts, frequencies, q_weight, k_weight),
        interleaved=interleaved,
        scale=scale,
        eps=eps,
        weight_offset=weight_offset,
    )
    count_writes(kv, q)


def cache_of(kv: PagedKV) -> tuple[Tensor | None, ...]:
    """Return the tensors of a cache in the order of the schemas."""
    scales = kv.key_scales, kv.value_scales
    return kv.keys, kv.values, kv.violations, *scales, kv.table, kv.lengths


def count_writes(kv: PagedKV, *others: Tensor) -> None:
    """Count a write to the cache, and to others, as a native op does not."""
    if not torch.compiler.is_compiling():
        written = (*others, kv.keys, kv.values, kv.violations, kv.key_scales, kv.value_scales)
        torch.autograd.graph.increment_version([t for t in written if t is not None])


def rope_append_ref_(
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
    scale: float = 1.0,
) -> None:
    """Do what rope_append_ does, in float64 and plain torch: its definition, for tests.

    The tensors of q and kv may be in float64, too; with scales, kv's elements are codes that are
    not rounded.
    """
    if frequencies is None:
        frequencies = torch.empty(0, dtype=torch.float64, device=q.device)
    for row in range(len(q)):
        slot = row if slots is None else int(slots[row])
        count = q.shape[1] if counts is None else int(counts[row])
        if slot < 0 or count == 0:
            continue
        length = int(kv.lengths[slot])
        at = torch.arange(length - count, length, device=q.device)
        heads = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            x = x[row, :count].double()
            if weight is not None:
                x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
                x = x * (weight.double() + weight_offset)
            turned = rope_ref(x, None, at, frequencies, interleaved=interleaved, scale=scale)
            assert isinstance(turned, Tensor)
            heads.append(turned)
        q[row, :count] = heads[0].to(q.dtype)
        places = kv.table[slot, at // PAGE].long(), slice(None), at % PAGE
        for elements, scales, x in (
            (kv.keys, kv.key_scales, heads[1]),
            (kv.values, kv.value_scales, v[row, :count].double()),
        ):
            if scales is not None:
                largest = 127 if kv.keys.dtype == torch.int8 else 448
                of_head = x.abs().amax(-1) / largest
                scales[places] = of_head.to(scales.dtype)
                x = (x / of_head.unsqueeze(-1)).nan_to_num(0)
                x = x.round() if kv.keys.dtype == torch.int8 else x
            elements[places] = x.to(elements.dtype)
