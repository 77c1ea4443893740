"""What the benchmarks of norms share: the forms, and the work there is."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import Form, Shape, workloads
from benchmarks.workloads import BF16, F32, Workload

Norm = Callable[..., object]


def workloads_of(
    name: str, norm: Norm, torchs: Norm, vectors: int
) -> Mapping[str, Sequence[Workload]]:
    """Return what there is to measure on each device.

    Args:
        name: of the op.
        norm: ours, which takes x, its vectors and residual=.
        torchs: takes x and the vectors.
        vectors: how many there are.
    """

    def ours(*operands: Tensor) -> object:
        x, *others = operands
        if len(others) == vectors:
            return norm(x, *others)
        return norm(x, *others[:-1], residual=others[-1])

    def unfused(*operands: Tensor) -> object:
        x, *others = operands
        if len(others) == vectors:
            return torchs(x, *others)
        total = x + others[-1]
        return torchs(total, *others[:-1]), total

    def ways() -> dict[str, Callable[..., object]]:
        compiled = torch.compile(unfused, dynamic=False)
        return {name: ours, "torch, compiled": compiled, "torch": unfused}

    def operands(shape: Shape, dtype: torch.dtype, device: str, residual: bool) -> list[Tensor]:
        shapes = [shape, *[shape[-1:]] * vectors, *[shape] * residual]
        return [torch.randn(each, device=device).to(dtype) for each in shapes]

    forms = [
        Form("", partial(operands, residual=False), 2, 3, name),
        # The sum has a gradient too.
        Form("with residual", partial(operands, residual=True), 4, 4),
    ]
    made = partial(workloads, ways, forms)
    return {
        "cpu": [*made((4096, 4096), F32), *made((4096, 4096), BF16), *made((64, 4096), BF16)],
        "cuda": [
            *made((16384, 4096), BF16, calls=10),
            *made((16384, 4096), F32, calls=10),
            *made((65536, 1024), BF16, calls=10),
            *made((8192, 8192), BF16, calls=10),
            *made((4096, 16384), BF16, calls=10),
            *made((512, 131072), BF16, calls=10),
            *made((262144, 128), BF16, calls=10),
            *made((32, 4096), BF16, calls=50),
        ],
    }
