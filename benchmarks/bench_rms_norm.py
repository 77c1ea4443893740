"""rms_norm of deepspeed_ext and of torch: `python -m benchmarks.bench_rms_norm --device cpu`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Form, Shape, works
from benchmarks.works import BF16, F32, main
from deepspeed_ext.ops import rms_norm

EPS = 1e-6


def ours(weight: Tensor, x: Tensor, *residual: Tensor) -> object:
    return rms_norm(x, weight, residual=residual[0]) if residual else rms_norm(x, weight)


def torchs(weight: Tensor, x: Tensor, *residual: Tensor) -> object:
    total = x + residual[0] if residual else x
    out = F.rms_norm(total, weight.shape, weight, EPS)
    return (out, total) if residual else out


def ways() -> dict[str, Callable[..., object]]:
    compiled = torch.compile(torchs, dynamic=False)
    return {"rms_norm": ours, "torch, compiled": compiled, "torch": torchs}


def operands(shape: Shape, dtype: torch.dtype, device: str, residual: bool) -> list[Tensor]:
    shapes = [shape[-1:], *[shape] * (1 + residual)]
    return [torch.randn(each, device=device).to(dtype) for each in shapes]


FORMS = [
    Form("", partial(operands, residual=False), 2, 3),
    Form("with residual", partial(operands, residual=True), 4, 4),  # the sum has a gradient too
]
made = partial(works, ways, FORMS)
WORKS = {
    "cpu": [*made((4096, 4096), F32), *made((4096, 4096), BF16), *made((64, 4096), BF16)],
    "cuda": [
        *made((16384, 4096), BF16, calls=10),
        *made((16384, 4096), F32, calls=10),
        *made((65536, 1024), BF16, calls=10),
        *made((8192, 8192), BF16, calls=10),
        *made((4096, 16384), BF16, calls=10),
        *made((262144, 128), BF16, calls=10),
        *made((32, 4096), BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKS)
