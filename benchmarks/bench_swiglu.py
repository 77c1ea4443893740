"""swiglu of deepspeed_ext and of torch: `python -m benchmarks.bench_swiglu --device cpu`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, main
from deepspeed_ext.ops import swiglu


def torchs(gate: Tensor, *up: Tensor) -> Tensor:
    gate, other = (gate, up[0]) if up else gate.chunk(2, -1)
    return F.silu(gate) * other


def ways() -> dict[str, Callable[..., object]]:
    return {
        "swiglu": swiglu,
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def operands(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(2)]


def packed(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn((*shape[:-1], 2 * shape[-1]), device=device).to(dtype)]


FORMS = [Form("", operands, 3, 5, "swiglu"), Form("packed", packed, 3, 5)]
made = partial(workloads, ways, FORMS)
WORKLOADS = {
    "cpu": [*made((4096, 4096), F32), *made((4096, 4096), BF16)],
    "cuda": [
        *made((8192, 14336), BF16, calls=10),
        *made((8192, 14336), F32, calls=10),
        *made((32, 14336), BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
