"""rope of deepspeed_ext and of torch: `python -m benchmarks.bench_rope --device cpu`.

The shape of a work is (tokens, heads, width), of q and k together: a fifth of the heads are k's.
Torch has cosines and sines at hand, in the dtype of q and k, as models do; ours works them out.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, main
from deepspeed_ext.ops import rope, rope_frequencies

BASE = 500000.0


def ours(q: Tensor, k: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Turn both; positions and frequencies are made once for all calls."""
    positions, frequencies, _, _ = tables(q, interleaved)
    return rope(q, k, positions, frequencies, interleaved=interleaved)


def torchs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn halves as Llama's code does."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k)


def torchs_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn neighbours as GPT-J's code does."""

    def turned(x: Tensor) -> Tensor:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + other * sin

    return turned(q), turned(k)


_TABLES: dict[tuple[object, ...], tuple[Tensor, ...]] = {}


def tables(q: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return positions, frequencies, cosines and sines for all tokens."""
    key = (q.shape[0], q.shape[-1], q.dtype, q.device, interleaved)
    if key not in _TABLES:
        positions = torch.arange(q.shape[0], device=q.device)
        frequencies = rope_frequencies(q.shape[-1], base=BASE).to(q.device)
        angles = positions[:, None] * frequencies
        double = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
        cos, sin = (f(double)[:, None].to(q.dtype) for f in (torch.cos, torch.sin))
        _TABLES[key] = (positions, frequencies, cos, sin)
    return _TABLES[key]


def ways(interleaved: bool) -> Mapping[str, Callable[..., object]]:
    theirs = torchs_interleaved if interleaved else torchs
    compiled = torch.compile(theirs, dynamic=False)
    return {
        "rope": partial(ours, interleaved=interleaved),
        "torch, compiled": lambda q, k: compiled(q, k, *tables(q, interleaved)[2:]),
        "torch": lambda q, k: theirs(q, k, *tables(q, interleaved)[2:]),
    }


def operands(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Make q and k, slices of one projection."""
    tokens, heads, width = shape
    q = torch.randn((tokens, heads + heads // 5, width), device=device).to(dtype)
    return list(q[:, :heads].split([heads - heads // 5, heads // 5], -2))


made = partial(workloads, partial(ways, False), [Form("", operands, 2, 2)])
interleaved = partial(workloads, partial(ways, True), [Form("interleaved", operands, 2, 2)])
WORKLOADS = {
    "cpu": [
        work
        for make in (made, interleaved)
        for dtype in (F32, BF16)
        for work in make((4096, 40, 128), dtype)
    ],
    "cuda": [
        *made((16384, 40, 128), BF16, calls=20),
        *interleaved((16384, 40, 128), BF16, calls=20),
        *made((16384, 40, 128), F32, calls=20),
        *made((32, 40, 128), BF16, calls=50),
        *made((1, 40, 128), BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
