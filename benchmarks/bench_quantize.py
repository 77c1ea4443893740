"""quantize and dequantize beside torch's compiler: `python -m benchmarks.bench_quantize`.

Bytes are those of floats, codes and scales, once each; they are counted by groups, which the
tables call elements. On CUDA calls are in a graph.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import Shape, captured, copy_contender, in_turn
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import dequantize, quantize

GROUP = 128
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0}


def torchs_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The formula as one would write it."""
    groups = x.view(-1, GROUP).float()
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST[format]).clamp_min(2.0**-126)
    quotients = groups / scales
    if format == "fp8_e4m3":
        return quotients.to(torch.float8_e4m3fn), scales
    codes = quotients.round().to(torch.int8)
    if format == "int8":
        return codes, scales
    pairs = (codes + 8).view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def torchs_dequantize(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    if format == "int4":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    return (codes.float() * scales).to(dtype)


def bytes_of(format: str, dtype: torch.dtype) -> int:
    """Of a group, its codes and its scale."""
    return GROUP * dtype.itemsize + GROUP // (2 if format == "int4" else 1) + 4


def contenders(
    shapes: Shapes, device: str, *, format: str, dtype: torch.dtype, calls: int, backward: bool
) -> list[Contender]:
    """Return ours, torch's and a copy; backward: from codes to floats."""
    ((rows, groups),) = shapes
    shape = rows, groups * GROUP
    operands = [torch.randn(shape, device=device).to(dtype)]
    ours: Callable[..., object] = partial(quantize, format=format, group_size=GROUP)
    theirs: Callable[..., object] = partial(torchs_quantize, format=format)
    of_theirs = of_ours = operands
    if backward:
        made = quantize(operands[0], format, group_size=GROUP)
        of_ours = [made.codes, made.scales]
        of_theirs = [made.codes.view(made.scales.numel(), -1), made.scales.view(-1, 1)]
        ours = partial(dequantize, format=format, group_size=GROUP, dtype=dtype)
        theirs = partial(torchs_dequantize, format=format, dtype=dtype)
    compiled = torch.compile(theirs, dynamic=False)
    passes = bytes_of(format, dtype) / (GROUP * dtype.itemsize)

    def contender(name: str, way: Callable[..., object], given: list[Tensor]) -> Contender:
        run = in_turn([lambda: way(*given)])
        return Contender(name, captured(device, lambda: run, calls))

    return [
        contender("dequantize" if backward else "quantize", ours, of_ours),
        contender("torch, compiled", compiled, of_theirs),
        copy_contender(passes, shape, dtype, device, calls),
    ]


def made(format: str, shape: Shape, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    """Return the work of one format there and back."""
    what = f"{format}, groups of {GROUP}, {str(dtype).partition('.')[2]},"
    what += f" {' x '.join(f'{n:,}' for n in shape)}{f', {calls} times' * (calls > 1)}"
    return [
        Workload(
            f"{name} {what}",
            [(shape[0], shape[1] // GROUP)],
            bytes_of(format, dtype) * calls,
            partial(contenders, format=format, dtype=dtype, calls=calls, backward=backward),
        )
        for name, backward in (("quantize", False), ("dequantize", True))
    ]


WORKLOADS = {
    "cpu": [
        work
        for format in LARGEST
        for dtype in (F32, BF16)
        for work in made(format, (4096, 4096), dtype)
    ],
    "cuda": [
        *(work for format in LARGEST for work in made(format, (65536, 4096), BF16, calls=4)),
        *made("int8", (65536, 2048), F32, calls=4),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
