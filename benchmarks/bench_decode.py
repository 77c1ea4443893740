"""decode_attention of deepspeed_ext beside torch's: `python -m benchmarks.bench_decode`.

One new token of each slot, with 32 heads of queries and 8 of keys and values. The shape of a work
is that of the keys: (slots, tokens, heads, width). Our cache lies in pages in random order, torch's
in one piece as it likes it best: heads before tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.functional import CACHE, captured, in_turn
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import PagedKV, decode_attention

GROUP = 4
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def paged(shape: tuple[int, ...], stored: torch.dtype, device: str) -> PagedKV:
    """Make a cache of random content whose slots are full."""
    slots, tokens, heads, width = shape
    pages = slots * tokens // 64
    made = [torch.randn((pages, heads, 64, width), device=device) for _ in range(2)]
    if stored.itemsize == 1:
        made = [each.mul_(30).clamp_(-127, 127) for each in made]
    elements = [each.to(stored) for each in made]
    scales = [torch.full((pages, heads, 64), 1 / 30, device=device) for _ in range(2)]
    return PagedKV(
        *elements,
        torch.randperm(pages, device=device).int().view(slots, -1),
        torch.full((slots,), tokens, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        *(scales if stored.itemsize == 1 else ()),
    )


def ours(q: Tensor, kv: PagedKV) -> object:
    return decode_attention(q, kv)


def torchs(q: Tensor, keys: Tensor, values: Tensor) -> object:
    """Queries that share keys as if they were tokens, so that these are read once."""
    grouped = q.view(q.shape[0], -1, GROUP, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, keys, values)


def torchs_by_cudnn(q: Tensor, keys: Tensor, values: Tensor) -> object:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads_first = q.transpose(1, 2)
        return F.scaled_dot_product_attention(heads_first, keys, values, enable_gqa=True)


def contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, stored: torch.dtype, calls: int
) -> list[Contender]:
    """Return ours, and torch's; beside codes, ours of floats."""
    (shape,) = shapes
    slots, tokens, heads, width = shape
    q = torch.randn((slots, 1, heads * GROUP, width), device=device).to(dtype)

    def contender(
        name: str, make: Callable[[], Callable[[], object]], bytes_each: int
    ) -> Contender:
        size = 2 * torch.Size(shape).numel() * bytes_each
        copies = max(1, -(-CACHE // size)) if device == "cuda" else 1
        run = in_turn([make() for _ in range(copies)])
        return Contender(name, captured(device, lambda: run, calls))

    def of_cache(kind: torch.dtype) -> Callable[[], object]:
        return partial(ours, q, paged(shape, kind, device))

    def dense(way: Callable[..., object]) -> Callable[[], object]:
        made = (slots, heads, tokens, width)
        both = (torch.randn(made, device=device).to(dtype) for _ in range(2))
        return partial(way, q, *both)

    made = [contender("decode_attention", partial(of_cache, stored), stored.itemsize)]
    if stored != dtype:
        floats = f"decode_attention, {str(dtype).partition('.')[2]}"
        return [*made, contender(floats, partial(of_cache, dtype), dtype.itemsize)]
    rivals = {"torch, groups as tokens": torchs}
    if device == "cuda":
        rivals["torch, cuDNN"] = torchs_by_cudnn
    return [
        *made,
        *(contender(name, partial(dense, way), dtype.itemsize) for name, way in rivals.items()),
    ]


def work(
    slots: int, tokens: int, dtype: torch.dtype, stored: str = "", width: int = 128, calls: int = 1
) -> Workload:
    kind = CODES.get(stored, dtype)
    name = f"{stored or str(dtype).partition('.')[2]}, {slots} x {tokens:,}"
    name += f", {calls} times" * (calls > 1)
    made = partial(contenders, dtype=dtype, stored=kind, calls=calls)
    return Workload(
        name, [(slots, tokens, 8, width)], 2 * kind.itemsize * calls, made, only_reads=True
    )


WORKLOADS = {
    "cpu": [
        work(1, 4096, BF16),
        work(8, 4096, BF16),
        work(8, 4096, F32),
        work(8, 4096, BF16, "int8"),
        work(8, 4096, BF16, "fp8"),
    ],
    "cuda": [
        work(1, 4096, BF16, calls=20),
        work(8, 4096, BF16, calls=20),
        work(32, 4096, BF16, calls=20),
        work(64, 8192, BF16, calls=20),
        work(32, 4096, BF16, "int8", calls=20),
        work(32, 4096, BF16, "fp8", calls=20),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
