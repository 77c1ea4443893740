"""Attention of a few new tokens of each slot over the keys and values in a cache."""

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import check_numbers, define
from deepspeed_ext.ops.attention.paged_kv import PAGE, PagedKV, kind_of, libraries_of


class AttentionOps:
    """The overloads of an op of attention over a cache, one for each kind of cache.

    Args:
        name: of the op, before the kind of the cache.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.of_kind = {kind: self._define(kind) for kind in ("", "int8", "fp8")}

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        *others: Tensor | None,
        scale: float | None,
        softcap: float,
        window: int,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call the overload for a cache, with what is behind it in the schema."""
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if type(scale) is not float or type(softcap) is not float:
            check_numbers(self._name, scale=scale, softcap=softcap)
        cache = (kv.keys, kv.values, kv.table, kv.lengths, kv.key_scales, kv.value_scales)
        op = self.of_kind[kind_of(kv)]
        out, lse = op(q, *cache, *others, scale=scale, window=window, softcap=softcap)
        return (out, lse) if return_lse else out

    def _define(self, kind: str) -> Any:
        return define(
            f"{self._name}{'.' * bool(kind)}{kind}(Tensor q, Tensor keys, Tensor values,"
            " Tensor table, Tensor lengths, Tensor? key_scales, Tensor? value_scales,"
            " Tensor? slots, Tensor? counts, Tensor? alibi_slopes, Tensor? sinks, *, float scale,"
            " int window, float softcap) -> (Tensor out, Tensor lse)",
            libraries_of(kind),
            fake=fake_attention,
        )


def fake_attention(q: Tensor, *others: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return results of attention, and its lse, without values."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


_OPS = AttentionOps("decode_attention")


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let the last tokens of each slot attend to all tokens of the slot up to themselves.

    A query has the same bits alone, in any batch, beside any others, with one new token at a time
    or 16 at once, whatever pages its slot has and whatever capacity; on the CPU also with any
    number of threads and any instruction set; on CUDA in every run. Keys are cut into chunks of
    256, counted from the start of the slot and put together in their order. Arithmetic is in
    float32; on CUDA, queries, keys and values of 16 bits, and weights rounded as the values are,
    are multiplied as they are, and codes as they are, but for their scales. What a query does not
    see has no part in its result, NaN included.

    On CUDA the host does not know lengths, so the workspace of a call is for all that may be there:
    4 (head_dim + 16) bytes for each head and token of q, for each 256 tokens of a slot's capacity,
    or of window and new tokens if these are fewer. Keys and values are read at the speed of memory
    if q is of 16 bits, they are codes or as q, and each of their heads begins at, and has, a
    multiple of 16 bytes.

    Args:
        q: (batch, tokens, heads, head_dim), float32, bfloat16 or float16: 1 to 16 tokens that are
            the last ones of their slots, in their order. Slices of a projection are no copies.
        kv: a layer of a ``KVCache``, with the keys and values of these tokens in it already.
            Head_dim is 1 to 256; heads of q are a multiple of its heads, neighbours share one.
        slots: (batch,), int32: the slot of each row of q, or -1 for none, whose results are 0.
            None: row i is slot i, and there are as many.
        counts: (batch,), int32: how many of a row's tokens there are; the results of those behind
            them are 0. None: all.
        scale: of the scores; None for 1 / sqrt(head_dim).
        alibi_slopes: (heads,), float32, times a key's distance: taken from its score.
        window: how many keys a query sees at most, itself included; 0 for all.
        softcap: scores become softcap * tanh(score / softcap), before slopes; 0 for none, or more
            than 1e-30.
        sinks: (heads,), float32: the score of one more key, whose value is 0.
        return_lse: whether to return the logarithm of the sum of exponentials, too.

    Returns:
        The shape of q, contiguous, of its dtype; and with return_lse (batch, tokens, heads),
        float32, -inf where nothing is seen, as the result is 0 there. All of a row is NaN if its
        slot, count or length cannot be, or a page of the table, as the host cannot look at them.

    Raises:
        RuntimeError: a gradient is wanted: there is none.

    See: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    ``decode_attention_ref`` is the same in float64.
    """
    if type(q) is not Tensor or type(kv) is not PagedKV:
        check_kinds("decode_attention", q=(q, Tensor), kv=(kv, PagedKV))
    others = (slots, counts, alibi_slopes, sinks)
    return _OPS(q, kv, *others, scale=scale, softcap=softcap, window=window, return_lse=return_lse)


def decode_attention_ref(
    q: Tensor,
    kv: PagedKV,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what decode_attention does, in float64 and plain torch: its definition, for tests."""
    batch, tokens, heads, width = q.shape
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float64)
    scale = 1 / math.sqrt(width) if scale is None else scale
    for row in range(batch):
        slot = row if slots is None else int(slots[row])
        count = tokens if counts is None else int(counts[row])
        if slot < 0 or count == 0:
            continue
        length = int(kv.lengths[slot])
        keys, values = (_tokens_of(kv, slot, length, i) for i in range(2))  # heads, tokens, width
        group = heads // keys.shape[0]
        queries = q[row, :count].double().transpose(0, 1)  # heads, tokens, width
        scores = scale * queries @ keys.repeat_interleave(group, 0).transpose(1, 2)
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        at = torch.arange(length - count, length, device=q.device)
        distance = at[:, None] - torch.arange(length, device=q.device)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * distance
        seen = (distance >= 0) & ((distance < window) if window > 0 else True)
        scores = scores.masked_fill(~seen, -math.inf)
        sink = torch.full((heads, 1, 1), -math.inf, dtype=torch.float64, device=q.device)
        if sinks is not None:
            sink = sinks.double()[:, None, None]
        total = torch.logsumexp(torch.cat([scores, sink.expand(-1, count, 1)], -1), -1)
        weights = (scores - total[..., None]).exp().masked_fill(~seen, 0)
        terms = values.repeat_interleave(group, 0)
        for i in range(count):  # one by one, as what is not seen is to have no part
            here = seen[i]
            out[row, i] = (weights[:, i, here, None] * terms[:, here]).sum(1)
        lse[row, :count] = total.transpose(0, 1)
    return (out, lse) if return_lse else out


def _tokens_of(kv: PagedKV, slot: int, length: int, which: int) -> Tensor:
    """Return the keys, or values, of a slot in float64: (heads, tokens, width)."""
    pages = kv.table[slot, : -(-length // PAGE)].long()
    stored, scales = ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))[which]
    elements = stored[pages].double()
    if scales is not None:
        elements = elements * scales[pages].double().unsqueeze(-1)
    return elements.transpose(0, 1).flatten(1, 2)[:, :length]
