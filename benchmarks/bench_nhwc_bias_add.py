"""Biases of images that lie channels last: `python -m benchmarks.bench_nhwc_bias_add`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, Workload, main
from deepspeed_ext.ops import nhwc_bias_add


def ways() -> Mapping[str, Callable[..., object]]:
    def torchs(x: Tensor, bias: Tensor, other: Tensor | None = None) -> Tensor:
        total = x + bias[:, None, None]
        return total if other is None else total + other

    return {
        "nhwc_bias_add": nhwc_bias_add,
        "torch, compiled": torch.compile(torchs, dynamic=False),
        "torch": torchs,
    }


def alone(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    like = dict(device=device, dtype=dtype)
    x = torch.randn(shape, **like).contiguous(memory_format=torch.channels_last)
    return [x, torch.randn(shape[1], **like)]


def with_other(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [*alone(shape, dtype, device), alone(shape, dtype, device)[0]]


def made(shape: Shape, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    forms = [Form("bias", alone, 2, 0), Form("bias and another", with_other, 3, 0)]
    works = workloads(ways, forms, shape, dtype, calls)
    return [work for work in works if work.name.startswith("forward")]


WORKLOADS = {
    "cpu": made((2, 320, 64, 64), F32),
    "cuda": made((16, 320, 128, 128), BF16, calls=20),
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
