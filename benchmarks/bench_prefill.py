"""prefill_attention of deepspeed_ext beside torch's: `python -m benchmarks.bench_prefill`.

A chunk of a prompt of each slot, with 32 heads of queries and 8 of keys and values. The shape of a
work is that of the keys: (slots, tokens, heads, width). Our cache lies in pages in random order,
torch's in one piece as it likes it best: heads before tokens, and a mask in memory where it asks
for one.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.bench_decode import CODES, GROUP, paged
from benchmarks.functional import CACHE, captured, in_turn
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import PagedKV, prefill_attention

WINDOW, CAP = 1024, 30.0


def ours(q: Tensor, kv: PagedKV, options: Mapping[str, object]) -> object:
    return prefill_attention(q, kv, **options)  # type: ignore[arg-type]


def torchs(q: Tensor, keys: Tensor, values: Tensor) -> object:
    """By a mask that only says which of its corners it begins in, where torch knows such."""
    bias = causal_lower_right(q.shape[1], keys.shape[2])
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=True
    )


def torchs_by_cudnn(q: Tensor, keys: Tensor, values: Tensor) -> object:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads_first = q.transpose(1, 2)
        return F.scaled_dot_product_attention(
            heads_first, keys, values, is_causal=True, enable_gqa=True
        )


def torchs_by_mask(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> object:
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
    )


def contenders(
    shapes: Shapes,
    device: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    chunk: int,
    options: Mapping[str, object],
    calls: int,
) -> list[Contender]:
    """Return ours, and torch's where it can do that; beside codes, ours of floats."""
    (shape,) = shapes
    slots, tokens, heads, width = shape
    q = torch.randn((slots, chunk, heads * GROUP, width), device=device).to(dtype)

    def contender(name: str, make: Callable[[], Callable[[], object]]) -> Contender:
        size = 2 * torch.Size(shape).numel() * dtype.itemsize
        copies = max(1, -(-CACHE // size)) if device == "cuda" else 1
        run = in_turn([make() for _ in range(copies)])
        return Contender(name, captured(device, lambda: run, calls))

    def of_cache(kind: torch.dtype) -> Callable[[], object]:
        return partial(ours, q, paged(shape, kind, device), options)

    made = [contender("prefill_attention", partial(of_cache, stored))]
    if stored != dtype:
        name = f"prefill_attention, {str(dtype).partition('.')[2]}"
        return [*made, contender(name, partial(of_cache, dtype))]
    if "softcap" in options:  # torch has none
        return made
    distance = torch.arange(tokens - chunk, tokens, device=device)[:, None]
    distance = distance - torch.arange(tokens, device=device)
    mask = (distance >= 0) & (distance < options.get("window", tokens))

    def dense(way: Callable[..., object], *more: Tensor) -> Callable[[], object]:
        both = (torch.randn((slots, heads, tokens, width), device=device) for _ in range(2))
        return partial(way, q, *(t.to(dtype) for t in both), *more)

    by_mask = contender("torch, with a mask", partial(dense, torchs_by_mask, mask))
    if options or (device == "cpu" and chunk < tokens):  # there, torch makes a mask of it
        return [*made, by_mask]
    made.append(contender("torch, lower right", partial(dense, torchs)))
    if device == "cuda" and chunk == tokens:  # it knows no other corner
        made.append(contender("torch, cuDNN", partial(dense, torchs_by_cudnn)))
    return [*made, by_mask]


def work(
    slots: int,
    tokens: int,
    chunk: int,
    dtype: torch.dtype,
    stored: str = "",
    calls: int = 1,
    **options: object,
) -> Workload:
    kind = CODES.get(stored, dtype)
    name = f"{stored or str(dtype).partition('.')[2]}, {slots} x {chunk:,} against {tokens:,}"
    name += "".join(f", {option}" for option in options) + f", {calls} times" * (calls > 1)
    made = partial(contenders, dtype=dtype, stored=kind, chunk=chunk, options=options, calls=calls)
    bytes_each = 2 * kind.itemsize * calls
    return Workload(name, [(slots, tokens, 8, 128)], bytes_each, made, only_reads=True)


WORKLOADS = {
    "cpu": [
        work(1, 2048, 128, BF16),
        work(1, 2048, 128, F32),
        work(1, 512, 512, F32),
        work(1, 2048, 128, BF16, "int8"),
        work(1, 2048, 128, BF16, window=WINDOW),
    ],
    "cuda": [
        work(1, 8192, 512, BF16, calls=20),
        work(4, 8192, 512, BF16, calls=5),
        work(1, 2048, 2048, BF16, calls=20),
        work(1, 8192, 8192, BF16, calls=3),
        work(1, 8192, 512, BF16, "int8", calls=20),
        work(1, 8192, 512, BF16, "fp8", calls=20),
        work(1, 8192, 512, BF16, calls=20, window=WINDOW),
        work(1, 8192, 512, BF16, calls=20, softcap=CAP),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
