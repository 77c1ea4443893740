"""Attention of a chunk of new tokens of each slot over the keys and values in a cache."""

from typing import Any

from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops.attention.decode_attention import AttentionOps, decode_attention_ref
from deepspeed_ext.ops.attention.paged_kv import PagedKV

_OPS = AttentionOps("prefill_attention")


def prefill_attention(
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
    """Let a chunk of new tokens of each slot attend to all tokens of the slot up to themselves.

    It is ``decode_attention`` for chunks of a prompt: the same arguments and results, and the same
    in all that cannot be, with any number of tokens. Keys and values are read where they are, in
    their pages and as they are stored, once for a strip of tokens; nothing is put together, and
    there is no mask in memory.

    A query has the same bits alone, in any batch, however a prompt is cut into chunks, whatever
    pages its slot has and whatever capacity; on the CPU also with any number of threads and any
    instruction set; on CUDA in every run. They are not the bits of ``decode_attention``. Arithmetic
    is in float32; on CUDA, queries, keys and values of 16 bits or codes, and weights rounded to
    16 bits, are multiplied as they are. What a query does not see has no part in its result, NaN
    included. On CUDA an infinite value that it sees, but whose weight rounds to 0, makes NaN or
    infinity, which may depend on the cut.

    Args:
        q: (batch, tokens, heads, head_dim), float32, bfloat16 or float16: tokens that are the last
            ones of their slots, in their order. Slices of a projection are no copies.
        kv: a layer of a ``KVCache``, with the keys and values of these tokens in it already.
            Head_dim is 1 to 256; heads of q are a multiple of its heads, neighbours share one.
        slots: of ``decode_attention``, as all that follows.
        counts: likewise.
        scale: likewise.
        alibi_slopes: likewise.
        window: likewise.
        softcap: likewise.
        sinks: likewise.
        return_lse: likewise.

    Returns:
        What ``decode_attention`` does, of the shapes of this q.

    Raises:
        RuntimeError: a gradient is wanted: there is none.

    See: Dao, "FlashAttention-2", 2023, section 3.1. ``prefill_attention_ref`` is the same in
    float64.
    """
    if type(q) is not Tensor or type(kv) is not PagedKV:
        check_kinds("prefill_attention", q=(q, Tensor), kv=(kv, PagedKV))
    others = (slots, counts, alibi_slopes, sinks)
    return _OPS(q, kv, *others, scale=scale, softcap=softcap, window=window, return_lse=return_lse)


def prefill_attention_ref(q: Tensor, kv: PagedKV, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Do what prefill_attention does, in float64: what decode_attention_ref does."""
    return decode_attention_ref(q, kv, **options)
