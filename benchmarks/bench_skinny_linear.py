"""skinny_linear of deepspeed_ext and F.linear: `python -m benchmarks.bench_skinny_linear`.

Bytes are those of the weights. On CUDA calls are in a graph, and go through weights of 256 MB or
more in turn; beside them stands a kernel for each call that only reads its weight.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Shape, copies_of, forward_contender
from benchmarks.harness import Contender
from benchmarks.stream import Stream
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import skinny_linear

CHAIN = 8
Way = Callable[..., object]


def torchs_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


def chained(way: Callable[..., Tensor]) -> Way:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = way(x, weight)
        return x

    return run


@cache
def stream_of(device: str) -> Stream:
    return Stream("cuda" if device == "cuda" else "cpu")


def read(x: Tensor, *weights: Tensor) -> None:
    for weight in weights:
        stream_of("cuda").read(weight)


def plain_ways() -> dict[str, Way]:
    return {"skinny_linear": skinny_linear, "torch": F.linear}


def gated_ways() -> dict[str, Way]:
    return {
        "skinny_linear": partial(skinny_linear, activation="silu", gated=True),
        "torch, compiled": torch.compile(torchs_swiglu, dynamic=False),
        "torch": torchs_swiglu,
    }


def chain_ways() -> dict[str, Way]:
    return {"skinny_linear": chained(skinny_linear), "torch": chained(F.linear)}


def contenders(
    ways: Callable[[], dict[str, Way]],
    rows: int,
    dtype: torch.dtype,
    chain: int,
    calls: int,
    shapes: Shapes,
    device: str,
) -> list[Contender]:
    (shape,) = shapes
    (n, k), operands = shape, []
    for _ in range(max(1, -(-copies_of(shape, dtype, device) // chain))):
        weights = [torch.randn(n, k, device=device).div(k**0.5).to(dtype) for _ in range(chain)]
        operands.append([torch.randn(rows, k, device=device).to(dtype), *weights])
    made = [forward_contender(name, way, operands, device, calls) for name, way in ways().items()]
    if device == "cuda":
        ceiling = forward_contender("reading, call by call", read, operands, device, calls)
        made.append(Contender(ceiling.name, ceiling.run, is_ceiling=True))
    return made


def made(
    rows: int,
    shape: Shape,
    dtype: torch.dtype,
    calls: int = 1,
    ways: Callable[[], dict[str, Way]] = plain_ways,
    form: str = "",
    chain: int = 1,
) -> Workload:
    """Return the work of one shape of a weight."""
    what = f"{str(dtype).partition('.')[2]}, {shape[0]:,} x {shape[1]:,}"
    name = f"{form}{form and ', '}{rows} rows, {what}{f', {calls} times' * (calls > 1)}"
    make = partial(contenders, ways, rows, dtype, chain, calls)
    return Workload(name, [shape], dtype.itemsize * calls * chain, make, only_reads=True)


SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
WORKLOADS = {
    "cpu": [made(rows, (14336, 4096), dtype) for dtype in (BF16, F32) for rows in (1, 8)],
    "cuda": [
        *[made(rows, shape, BF16, 20) for shape in SHAPES for rows in (1, 4, 16, 64)],
        *[made(1, shape, F32, 20) for shape in SHAPES[2:]],
        *[made(rows, (28672, 4096), BF16, 20, gated_ways, "swiglu") for rows in (1, 16)],
        *[made(rows, (4096, 4096), BF16, 5, chain_ways, "chain of 8", CHAIN) for rows in (1, 16)],
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
