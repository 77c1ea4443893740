"""quantized_linear of deepspeed_ext beside torch: `python -m benchmarks.bench_quantized_linear`.

Bytes are those of codes and scales. All contenders go through weights of 256 MB or more in turn, so
that none finds them in a cache. On CUDA calls are in a graph, and beside them stands a kernel for
each call that only reads the codes.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import CACHE, forward_contender
from benchmarks.harness import Contender
from benchmarks.stream import Stream
from benchmarks.workloads import BF16, Shapes, Workload, main
from deepspeed_ext.ops import PackedWeight, pack_weight, quantized_linear, unpack_weight
from deepspeed_ext.ops.quantization.packed_weight import row_bytes

GROUP = 128
Way = Callable[..., object]


@cache
def stream_of(device: str) -> Stream:
    return Stream("cuda" if device == "cuda" else "cpu")


def read(x: Tensor, codes: Tensor) -> None:
    stream_of("cuda").read(codes)


def turns(
    name: str,
    way: Way,
    operands: Callable[[], list[Tensor]],
    device: str,
    calls: int,
) -> Contender:
    """Return a contender that takes operands of 256 MB or more in turn."""
    made = [operands()]
    of_one = sum(tensor.nbytes for tensor in made[0])
    made += [operands() for _ in range(-(-CACHE // of_one) - 1)]
    return forward_contender(name, way, made, device, calls)


def packed(bits: int, n: int, k: int, device: str) -> PackedWeight:
    codes = torch.randint(0, 255, (n, k * bits // 8), dtype=torch.uint8, device=device)
    scales = torch.rand(n, k // GROUP, device=device) / k
    codes = codes if bits == 4 else codes.view(torch.int8)
    return pack_weight(codes, scales, format=f"int{bits}", group_size=GROUP)


def ours(
    bits: int, rows: int, n: int, k: int, input_format: str | None, device: str
) -> tuple[Way, Callable[[], list[Tensor]]]:
    empty = packed(bits, 0, k, device)

    def operands() -> list[Tensor]:
        weight = packed(bits, n, k, device)
        return [torch.randn(rows, k, device=device).to(BF16), weight.codes, weight.scales]

    def way(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        weight = empty._replace(codes=codes, scales=scales)
        return quantized_linear(x, weight, input_format=input_format)

    return way, operands


def torchs_low_bit(
    bits: int, rows: int, n: int, k: int, device: str
) -> tuple[Way, Callable[[], list[Tensor]]] | None:
    """Return torch's own op, as fast as its settings make it: with bfloat16."""
    ops = torch.ops.aten
    if bits == 8 and device == "cuda":
        return None

    def operands() -> list[Tensor]:
        x = torch.randn(rows, k, device=device).to(BF16)
        if bits == 8:
            codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
            return [x, codes, torch.rand(n).to(BF16) / k]
        scales = torch.rand(k // GROUP, n, 2, device=device).to(BF16) / k
        if device == "cpu":
            codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
            return [x, ops._convert_weight_to_int4pack_for_cpu(codes, 8), scales]
        codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=device)
        return [x, ops._convert_weight_to_int4pack(codes, 8), scales]

    def int4(x: Tensor, codes: Tensor, scales: Tensor) -> object:
        op = ops._weight_int4pack_mm_for_cpu if device == "cpu" else ops._weight_int4pack_mm
        return op(x, codes, GROUP, scales)

    return (int4 if bits == 4 else torch._weight_int8pack_mm), operands


def contenders(
    bits: int,
    rows: int,
    shape: tuple[int, int],
    input_format: str | None,
    calls: int,
    shapes: Shapes,
    device: str,
) -> list[Contender]:
    n, k = shape

    def floats() -> list[Tensor]:
        weight = torch.randn(n, k, device=device).to(BF16)
        return [torch.randn(rows, k, device=device).to(BF16), weight]

    way, operands = ours(bits, rows, n, k, input_format, device)
    made = [turns("quantized_linear", way, operands, device, calls)]
    made.append(turns("torch, bfloat16", F.linear, floats, device, calls))
    other = torchs_low_bit(bits, rows, n, k, device)
    if other is not None:
        made.append(turns(f"torch, int{bits}", *other, device, calls))
    if device == "cuda":
        only_codes = turns("reading, call by call", read, lambda: operands()[:2], device, calls)
        made.append(Contender(only_codes.name, only_codes.run, is_ceiling=True))
    return made


def made(
    bits: int, rows: int, shape: tuple[int, int], input_format: str | None = None, calls: int = 1
) -> Workload:
    n, k = shape
    what = f"W{bits}A{16 if input_format is None else 8}, {n:,} x {k:,}"
    name = f"{rows} rows, {what}{f', {calls} times' * (calls > 1)}"
    of_row = row_bytes(k, bits) + 4 * k // GROUP
    make = partial(contenders, bits, rows, shape, input_format, calls)
    return Workload(name, [(n, of_row)], calls, make, only_reads=True)


def unpacking(bits: int, shape: tuple[int, int], shapes: Shapes, device: str) -> list[Contender]:
    """Return what a call with over 64 rows does first."""
    way = partial(unpack_weight, packed(bits, *shape, device), BF16)
    return [forward_contender("unpack_weight", way, [[]], device, 1)]


def unpacked(bits: int, shape: tuple[int, int]) -> Workload:
    n, k = shape
    name = f"unpack_weight, W{bits}, {n:,} x {k:,}"
    return Workload(name, [(n, row_bytes(k, bits) + 2 * k)], 1, partial(unpacking, bits, shape))


CPU, SHAPES = (4096, 14336), ((14336, 4096), (4096, 14336), (4096, 4096))
WORKLOADS = {
    "cpu": [
        *[
            made(bits, rows, CPU, input_format)
            for bits in (4, 8)
            for input_format in (None, "int8")
            for rows in (1, 8)
        ],
        *[unpacked(bits, CPU) for bits in (4, 8)],
    ],
    "cuda": [
        made(bits, rows, shape, input_format, 20)
        for bits in (4, 8)
        for shape in SHAPES
        for input_format in (None, "int8")
        for rows in (1, 4, 16, 64, 256)
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
