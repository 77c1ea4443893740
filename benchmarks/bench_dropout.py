"""Dropout with bias and residual, or of an activation: `python -m benchmarks.bench_dropout`.

Each call draws a seed, as training does. Torch's rivals draw in their own ways.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, Workload, main
from deepspeed_ext.ops import bias_dropout_residual, dropout_activation

P = 0.1


def ways() -> Mapping[str, Callable[..., object]]:
    def torchs(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.dropout(x + bias, P) + residual

    return {
        "bias_dropout_residual": partial(bias_dropout_residual, p=P),
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def ways_of_activation() -> Mapping[str, Callable[..., object]]:
    def torchs(x: Tensor, bias: Tensor) -> Tensor:
        return F.dropout(F.gelu(x + bias, approximate="tanh"), P)

    return {
        "dropout_activation": partial(dropout_activation, p=P, activation="gelu_tanh"),
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def operands(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    sizes = (shape, shape[-1:], shape)
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def of_activation(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return operands(shape, dtype, device)[:2]


def made(shape: Shape, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    form = [Form("", operands, 3, 2)]
    activated = [Form("gelu_tanh", of_activation, 2, 3)]
    return [
        *workloads(ways, form, shape, dtype, calls),
        *workloads(ways_of_activation, activated, shape, dtype, calls),
    ]


WORKLOADS = {
    "cpu": [work for dtype in (F32, BF16) for work in made((4096, 1024), dtype)],
    "cuda": [*made((32_768, 1024), BF16, calls=20), *made((4096, 1024), BF16, calls=20)],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
