"""rms_norm of deepspeed_ext and of torch: `python -m benchmarks.bench_rms_norm --device cpu`."""

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
from deepspeed_ext.ops import rms_norm

EPS = 1e-6
Make = Callable[[Shapes, str], list[Contender]]


def ours(weight: Tensor, x: Tensor, *residual: Tensor) -> object:
    return rms_norm(x, weight, residual=residual[0]) if residual else rms_norm(x, weight)


def torchs(weight: Tensor, x: Tensor, *residual: Tensor) -> object:
    total = x + residual[0] if residual else x
    out = F.rms_norm(total, weight.shape, weight, EPS)
    return (out, total) if residual else out


def ways() -> dict[str, Callable[..., object]]:
    compiled = torch.compile(torchs, dynamic=False)
    return {"rms_norm": ours, "torch, compiled": compiled, "torch": torchs}


def operands_of(shape: tuple[int, ...], dtype: torch.dtype, device: str, n: int) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(n)]


def forward(dtype: torch.dtype, residual: bool, calls: int) -> Make:
    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        shape = shapes[0]
        (weight,) = operands_of(shape[-1:], dtype, device, 1)
        operands = [
            (weight, *operands_of(shape, dtype, device, 1 + residual))
            for _ in range(copies_of(shape, dtype, device))
        ]
        return [
            *(
                forward_contender(name, way, operands, device, calls)
                for name, way in ways().items()
            ),
            copy_contender(4 if residual else 2, operands[0][1], device, calls),
        ]

    return contenders


def backward(dtype: torch.dtype, residual: bool, calls: int) -> Make:
    """Gradients of x and of weight; with a residual the sum has a gradient too."""

    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        (weight,) = operands_of(shapes[0][-1:], dtype, device, 1)
        leaves = [weight, *operands_of(shapes[0], dtype, device, 1 + residual)]
        for leaf in leaves:
            leaf.requires_grad_()
        return [
            *(backward_contender(name, way, leaves, device, calls) for name, way in ways().items()),
            copy_contender(4 if residual else 3, leaves[1], device, calls),
        ]

    return contenders


def works(rows: int, columns: int, dtype: torch.dtype, calls: int = 1) -> list[Work]:
    shape, size = [(rows, columns)], dtype.itemsize * calls
    name = f"{str(dtype).partition('.')[2]}, {rows:,} x {columns:,}" + f", {calls} times" * (
        calls > 1
    )
    return [
        Work(f"forward, {name}", shape, 2 * size, forward(dtype, False, calls)),
        Work(f"forward with residual, {name}", shape, 4 * size, forward(dtype, True, calls)),
        Work(f"backward, {name}", shape, 3 * size, backward(dtype, False, calls)),
        Work(f"backward with residual, {name}", shape, 4 * size, backward(dtype, True, calls)),
    ]


WORKS = {
    "cpu": [*works(4096, 4096, F32), *works(4096, 4096, BF16), *works(64, 4096, BF16)],
    "cuda": [
        *works(16384, 4096, BF16, calls=10),
        *works(16384, 4096, F32, calls=10),
        *works(65536, 1024, BF16, calls=10),
        *works(8192, 8192, BF16, calls=10),
        *works(4096, 16384, BF16, calls=10),
        *works(262144, 128, BF16, calls=10),
        *works(32, 4096, BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKS)
