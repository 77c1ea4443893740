"""swiglu of deepspeed_ext and of torch: `python -m benchmarks.bench_swiglu --device cpu`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import (
    backward_contender,
    copies_of,
    copy_contender,
    forward_contender,
)
from benchmarks.harness import Contender
from benchmarks.works import BF16, F32, Shapes, Work, main
from deepspeed_ext.ops import swiglu

Make = Callable[[Shapes, str], list[Contender]]


def torchs(gate: Tensor, *up: Tensor) -> Tensor:
    gate, other = (gate, up[0]) if up else gate.chunk(2, -1)
    return F.silu(gate) * other


def ways() -> dict[str, Callable[..., object]]:
    return {
        "swiglu": swiglu,
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def operands_of(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, packed: bool
) -> list[Tensor]:
    shape = (*shape[:-1], 2 * shape[-1]) if packed else shape
    return [torch.randn(shape, device=device).to(dtype) for _ in range(1 if packed else 2)]


def forward(dtype: torch.dtype, packed: bool, calls: int) -> Make:
    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        operands = [
            operands_of(shapes[0], dtype, device, packed)
            for _ in range(copies_of(shapes[0], dtype, device))
        ]
        like = torch.empty(shapes[0], dtype=dtype, device="meta")
        return [
            *(
                forward_contender(name, way, operands, device, calls)
                for name, way in ways().items()
            ),
            copy_contender(3, like, device, calls),
        ]

    return contenders


def backward(dtype: torch.dtype, packed: bool, calls: int) -> Make:
    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        leaves = operands_of(shapes[0], dtype, device, packed)
        for leaf in leaves:
            leaf.requires_grad_()
        like = torch.empty(shapes[0], dtype=dtype, device="meta")
        return [
            *(backward_contender(name, way, leaves, device, calls) for name, way in ways().items()),
            copy_contender(5, like, device, calls),
        ]

    return contenders


def works(rows: int, columns: int, dtype: torch.dtype, calls: int = 1) -> list[Work]:
    shape, size = [(rows, columns)], dtype.itemsize * calls
    name = f"{str(dtype).partition('.')[2]}, {rows:,} x {columns:,}" + f", {calls} times" * (
        calls > 1
    )
    return [
        Work(f"forward, {name}", shape, 3 * size, forward(dtype, False, calls)),
        Work(f"forward packed, {name}", shape, 3 * size, forward(dtype, True, calls)),
        Work(f"backward, {name}", shape, 5 * size, backward(dtype, False, calls)),
        Work(f"backward packed, {name}", shape, 5 * size, backward(dtype, True, calls)),
    ]


WORKS = {
    "cpu": [*works(2048, 5632, F32), *works(2048, 5632, BF16)],
    "cuda": [
        *works(8192, 14336, BF16, calls=10),
        *works(8192, 14336, F32, calls=10),
        *works(32, 14336, BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKS)
