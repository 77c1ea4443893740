"""Loss and gradient of logits: `python -m benchmarks.bench_cross_entropy --device cpu`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import Shape, captured, copy_contender
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]


def torchs(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def torchs_narrow(logits: Tensor, target: Tensor) -> Tensor:
    """In the dtype of the logits: half of the memory, and less exact."""
    return F.cross_entropy(logits, target)


def contenders(shapes: Shapes, device: str, dtype: torch.dtype, calls: int) -> list[Contender]:
    (shape,) = shapes
    rows, classes = shape
    target = torch.randint(classes, (rows,), device=device)

    def inplace() -> Callable[[], object]:
        logits = torch.randn(shape, dtype=dtype, device=device)

        def run() -> object:
            with torch.no_grad():  # the gradients are where the logits were
                return cross_entropy(logits, target, inplace=True)

        return run

    def through_autograd(loss_of: Loss) -> Callable[[], object]:
        leaf = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
        one = torch.ones((), device=device)

        def run() -> object:
            loss = loss_of(leaf, target)
            return torch.autograd.grad(loss, leaf, one.to(loss))

        return run

    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "cross_entropy, inplace": inplace,
        "cross_entropy": partial(through_autograd, cross_entropy),
        "torch, compiled": partial(through_autograd, torch.compile(torchs, dynamic=False)),
        "torch": partial(through_autograd, torchs_narrow),
    }
    made = [Contender(name, captured(device, make, calls)) for name, make in ways.items()]
    return [*made, copy_contender(2, shape, dtype, device, calls)]


def made(shape: Shape, dtype: torch.dtype, calls: int = 1) -> Workload:
    name = f"loss and gradient, {str(dtype).partition('.')[2]}, {shape[0]:,} x {shape[1]:,}"
    name += f", {calls} times" * (calls > 1)
    run = partial(contenders, dtype=dtype, calls=calls)
    return Workload(name, [shape], 2 * dtype.itemsize * calls, run)


WORKLOADS = {
    "cpu": [made((128, 128256), F32), made((128, 128256), BF16), made((4096, 4096), BF16)],
    "cuda": [
        made((8192, 128256), BF16, calls=5),
        made((8192, 131072), BF16, calls=5),
        made((8192, 32000), BF16, calls=20),
        made((8192, 50257), BF16, calls=5),
        made((4096, 128256), F32, calls=5),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
