"""Caches with random content for tests: pages in random order, garbage where no token is."""

import math
from typing import Any

import torch
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import PagedKV, decode_attention_ref

PAGE = 64
ROUNDING = torch.finfo(torch.float32).eps / 2


def make_kv(
    lengths: list[int],
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    capacity: int = 0,
    content: list[tuple[Tensor, Tensor]] | None = None,
) -> PagedKV:
    """Make the cache of these slots, float or int8 or float8_e4m3fn codes.

    Behind its last page is one more in memory, of finite numbers, which no op is to read or write.

    Args:
        lengths: of the slots.
        heads: of keys.
        width: of a head.
        dtype: of what is stored.
        device: of all tensors.
        seed: of content and order of pages.
        capacity: pages of a slot, or as many as the longest has, and one more.
        content: for each slot keys and values (tokens, heads, width) and nothing random, of floats.
    """
    random = torch.Generator().manual_seed(seed)
    of_slot = [-(-length // PAGE) for length in lengths]
    capacity = capacity or max(of_slot, default=0) + 1
    pages = sum(of_slot) + 3
    order = torch.randperm(pages, generator=random).int()
    table = torch.full((len(lengths), capacity), -1, dtype=torch.int32)
    begin = 0
    for slot, count in enumerate(of_slot):
        table[slot, :count] = order[begin : begin + count]
        begin += count
    step = max(1, 16 // dtype.itemsize)
    behind = pages + 1  # of the memory, so that there is a page that the cache has not
    shape = (behind, heads, PAGE, -(-width // step) * step)
    stored, scales = [], []
    for i in range(2):
        floats = torch.randn(shape, generator=random)
        if dtype.is_floating_point and dtype.itemsize > 1:
            made = torch.full(shape, torch.nan, dtype=dtype)
            for slot, length in enumerate(lengths):
                places = table[slot, : of_slot[slot]].long()
                values = floats[places]
                if content is not None:
                    flat = torch.zeros(len(places) * PAGE, heads, width)
                    flat[:length] = content[slot][i].float()
                    values[..., :width] = flat.unflatten(0, (-1, PAGE)).transpose(1, 2)
                values.transpose(1, 2).flatten(0, 1)[length:] = torch.nan
                keep = torch.arange(len(places) * PAGE).view(-1, 1, PAGE, 1) < length
                made[places] = torch.where(keep, values, torch.nan).to(dtype)
            made[pages] = 0
            stored.append(made.to(device)[:pages, ..., :width])
        else:
            codes = floats.mul(60 if dtype == torch.int8 else 100)
            largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
            least = -128 if dtype == torch.int8 else -largest  # whoever wrote the cache may use it
            codes = codes.clamp(least, largest)  # torch 2.11 makes NaN of more
            stored.append(codes.to(dtype).to(device)[:pages, ..., :width])
            scale = torch.rand(shape[:3], generator=random) * 0.02 + 0.01
            for slot, length in enumerate(lengths):  # NaN where no token is
                places = table[slot, : of_slot[slot]].long()
                keep = torch.arange(len(places) * PAGE).view(-1, 1, PAGE) < length
                scale[places] = torch.where(keep, scale[places], torch.nan)
            scales.append(scale.to(device)[:pages])
    return PagedKV(
        stored[0],
        stored[1],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        *scales,
    )


def on_cpu(kv: PagedKV) -> PagedKV:
    return PagedKV(*(t if t is None else t.cpu() for t in kv))


def queries(
    batch: int, tokens: int, heads: int, width: int, dtype: torch.dtype, device: str, seed: int = 1
) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((batch, tokens, heads, width), generator=random).to(dtype).to(device)


OPTIONS: dict[str, Any] = {  # of attention, for 4 slots and as many heads of queries
    "scale": 0.5,
    "window": 70,
    "softcap": 2.0,
    "alibi_slopes": [0.5, 0.25, 0.01, 0.0],
    "sinks": [1.0, -3.0, 5.0, -math.inf],
    "slots": [2, -1, 0, 3],
    "counts": [2, 5, 0, 4],
}


def option(name: str, device: str) -> Any:
    if not isinstance(OPTIONS[name], list):
        return OPTIONS[name]
    dtype = torch.int32 if name in ("slots", "counts") else torch.float32
    return torch.tensor(OPTIONS[name], dtype=dtype, device=device)


def assert_attends(op: Any, q: Tensor, kv: PagedKV, terms: float, **options: Any) -> None:
    """Compare an op of attention with the reference.

    A weight is off by the error of its score, relatively, as are sums of them; values count by
    magnitude, weighted. On CUDA, weights are rounded to the 16 bits of values.

    Args:
        op: decode_attention, or one of its kind.
        q: of the op, as what follows.
        kv: likewise.
        terms: how many of a dot product's are added up one after the other, at most.
        options: of the op.
    """
    out, lse = op(q, kv, return_lse=True, **options)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    wide = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    there = on_cpu(kv)
    want, want_lse = decode_attention_ref(q.cpu(), there, return_lse=True, **wide)
    magnitude = there._replace(values=there.values.double().abs())
    if there.value_scales is not None:
        magnitude = magnitude._replace(value_scales=there.value_scales.abs())
    total, _ = decode_attention_ref(q.cpu(), magnitude, return_lse=True, **wide)
    largest_key = there.keys.double().nan_to_num().abs().max() if there.keys.numel() else 0
    if there.key_scales is not None:
        largest_key = largest_key * there.key_scales.nan_to_num().abs().max()
    norm = q.cpu().double().abs().sum(-1) * largest_key
    scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
    of_score = (terms + 24) * ROUNDING * norm * abs(scale)
    of_score = of_score + 2.0**-21 * options.get("softcap", 0.0)
    if "alibi_slopes" in options:
        furthest = float(there.lengths.max())
        of_score = of_score + 4 * ROUNDING * wide["alibi_slopes"].abs() * furthest
    rounding = 2.0**-8 if q.is_cuda and q.dtype != torch.float32 else 0.0
    relative = 2 * of_score + 40 * ROUNDING + rounding
    assert_within("out", out.cpu(), want, relative.unsqueeze(-1) * total)
    finite = want_lse.isfinite()
    assert torch.equal(lse.cpu().isfinite(), finite)
    error = of_score + 40 * ROUNDING * (1 + want_lse.nan_to_num(0, 0, 0).abs())
    assert_within("lse", lse.cpu()[finite], want_lse[finite], error[finite])
