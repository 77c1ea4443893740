"""Adam with 8-bit state on CUDA, ours and others': `python -m benchmarks.bench_low_bit`.

Rivals that are not installed are left out, and named.
"""

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_steps import NUMBERS, ours, step_of
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, leaves, llama, main

SHAPES = llama(16, embedding=False)  # 3.5 B elements


def rivals(params: list[Tensor], **for_torchao: Any) -> list[Contender]:
    """Return what of the others is installed."""
    made = []
    for package, options in (("bitsandbytes", {}), ("torchao", for_torchao)):
        try:
            kind = importlib.import_module(f"{package}.optim").AdamW8bit
        except ImportError as error:
            print(f"without {package}: {error}", file=sys.stderr)
            continue
        made.append(step_of(kind(params, **NUMBERS, **options), f"{package} AdamW8bit"))
    return made


# The contenders step the same parameters, which are larger than any cache, so that all fit.
def bf16(shapes: Shapes, device: str) -> list[Contender]:
    params = leaves(shapes, BF16, device)
    made = step_of(ours(params, state_dtype=torch.uint8))
    return [made, *rivals(params, bf16_stochastic_round=True)]


def fp32(shapes: Shapes, device: str) -> list[Contender]:
    params = leaves(shapes, F32, device)
    return [step_of(ours(params, state_dtype=torch.uint8)), *rivals(params)]


def split(shapes: Shapes, device: str) -> list[Contender]:
    params = leaves(shapes, BF16, device)
    return [step_of(ours(params, state_dtype=torch.uint8, master="remainder"))]


WORKLOADS = {
    "cuda": [
        Workload("bf16 weights, 8-bit moments", SHAPES, 10, bf16),
        Workload("fp32 weights, 8-bit moments", SHAPES, 16, fp32),
        Workload("split weights, 8-bit moments", SHAPES, 14, split),
    ],
}


if __name__ == "__main__":
    main(__doc__, WORKLOADS)
