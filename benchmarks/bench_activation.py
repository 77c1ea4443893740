"""Activations of deepspeed_ext and of torch: `python -m benchmarks.bench_activation --device cpu`.

Gated ones other than swiglu, which has bench_swiglu, are in the forms "gated".
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, Workload, main
from deepspeed_ext.ops import bias_activation, gated_activation

THEIRS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def ways(activation: str) -> Mapping[str, Callable[..., object]]:
    function = THEIRS[activation]

    def torchs(x: Tensor, *bias: Tensor) -> Tensor:
        return function(x + bias[0] if bias else x)

    return {
        activation: partial(bias_activation, activation=activation),
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def gated_ways(activation: str) -> Mapping[str, Callable[..., object]]:
    function = THEIRS[activation]

    def torchs(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return function(gate) * up

    return {
        activation: partial(gated_activation, activation=activation),
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def alone(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype)]


def with_bias(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [*alone(shape, dtype, device), *alone(shape[-1:], dtype, device)]


def both(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return alone((*shape[:-1], 2 * shape[-1]), dtype, device)


def made(activation: str, shape: Shape, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    """Return the work of one activation, alone, with a bias, and as a gate."""
    plain = [Form(activation, alone, 2, 3), Form(f"{activation}, bias", with_bias, 2, 3)]
    gated = [Form(f"{activation}, gated", both, 3, 5)]
    return [
        *workloads(partial(ways, activation), plain, shape, dtype, calls),
        *workloads(partial(gated_ways, activation), gated, shape, dtype, calls),
    ]


WORKLOADS = {
    "cpu": [
        work
        for activation in THEIRS
        for dtype in (F32, BF16)
        for work in made(activation, (4096, 4096), dtype)
    ],
    "cuda": [
        *made("gelu", (16384, 4096), BF16, calls=20),
        *made("gelu", (4096, 16384), BF16, calls=20),
        *made("gelu_tanh", (16384, 4096), BF16, calls=20),
        *made("relu", (16384, 4096), BF16, calls=20),
        *made("gelu", (16384, 4096), F32, calls=20),
        *made("gelu", (32, 4096), BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
