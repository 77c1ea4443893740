"""What ops see of a cache of keys and values: tensors of one layer, in pages, and their tables."""

from typing import NamedTuple

import torch
from torch import Tensor

PAGE = 64  # tokens


class PagedKV(NamedTuple):
    """Keys and values of one layer; the tensors of a ``KVCache``, or made by hand.

    Token t of a slot is in row t % 64 of page table[slot, t // 64].

    Args:
        keys: (pages, kv_heads, 64, head_dim), float32, bfloat16 or float16, or codes, int8 or
            float8_e4m3fn. Heads lie in one piece.
        values: likewise, with the same strides.
        table: (slots, pages of a slot), int32: numbers of pages.
        lengths: (slots,), int32: tokens, those of the step under way included.
        violations: (1,), int32: not 0 once an op was to write outside of a slot's pages.
        key_scales: (pages, kv_heads, 64), float32: what codes are multiplied by; None for floats.
        value_scales: likewise.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    violations: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def kind_of(kv: PagedKV) -> str:
    """Return the overload of ops that takes such a cache: "" for floats, "int8" or "fp8"."""
    if kv.keys.dtype == torch.int8:
        return "int8"
    return "fp8" if kv.keys.dtype == torch.float8_e4m3fn else ""


def libraries_of(kind: str) -> dict[str, str]:
    """Return for each device the op library of a kind."""
    suffix = f"_{kind}" if kind else ""
    return {"cpu": f"cpu_kv_cache{suffix}", "cuda": f"fused_kv_cache{suffix}"}
