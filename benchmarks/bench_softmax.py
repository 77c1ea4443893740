"""softmax of deepspeed_ext and of torch: `python -m benchmarks.bench_softmax --device cpu`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, main
from deepspeed_ext.ops import softmax


def torchs(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def torchs_causal(x: Tensor) -> Tensor:
    above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(above, -torch.inf).softmax(-1)


def ways() -> dict[str, Callable[..., object]]:
    compiled = torch.compile(torchs, dynamic=False)
    return {"softmax": softmax, "torch, compiled": compiled, "torch": torchs}


def causal_ways() -> dict[str, Callable[..., object]]:
    compiled = torch.compile(torchs_causal, dynamic=False)
    ours = partial(softmax, causal=True)
    return {"softmax": ours, "torch, compiled": compiled, "torch": torchs_causal}


def operands(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype)]


made = partial(workloads, ways, [Form("", operands, 2, 3, "softmax")])
# Half is read, all is written.
causal = partial(workloads, causal_ways, [Form("causal", operands, 1.5, 2)])
WORKLOADS = {
    "cpu": [
        *made((4096, 4096), F32),
        *made((4096, 4096), BF16),
        *causal((4, 1024, 1024), BF16),
    ],
    "cuda": [
        *made((16384, 4096), BF16, calls=20),
        *made((16384, 4096), F32, calls=20),
        *made((4096, 16384), BF16, calls=20),
        *made((512, 131072), BF16, calls=20),
        *made((262144, 128), BF16, calls=20),
        *made((32, 4096), BF16, calls=50),
        *causal((32, 4096, 4096), BF16, calls=20),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
