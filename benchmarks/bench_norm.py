"""L2 norms, ours and of torch, and fingerprints: `python -m benchmarks.bench_norm --device cpu`."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, BIG, F32, SMALL, Shapes, Workload, llama, main
from deepspeed_ext.ops import fingerprints, l2_norm, squared_norms


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The form of it in torch that its clip_grad_norm_ has."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def norms_of(dtype: torch.dtype) -> Callable[[Shapes, str], list[Contender]]:
    """Return what makes the contenders; all read the same tensors, which none writes."""

    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        return [
            Contender("l2_norm", lambda: l2_norm(tensors)),
            Contender("torch, foreach", lambda: foreach_norm(tensors)),
            Contender("torch get_total_norm", lambda: torch.nn.utils.get_total_norm(tensors)),
        ]

    return contenders


def work(name: str, shapes: Shapes, dtype: torch.dtype) -> Workload:
    return Workload(name, shapes, dtype.itemsize, norms_of(dtype), only_reads=True)


def fingerprints_of(shapes: Shapes, device: str) -> list[Contender]:
    """Return fingerprints beside the op of ours that reads the same memory; torch has none."""
    tensors = [torch.randn(shape, device=device).to(BF16) for shape in shapes]
    return [
        Contender("fingerprints", lambda: fingerprints(tensors)),
        Contender("squared_norms", lambda: squared_norms(tensors)),
    ]


def fingerprint_work(name: str, shapes: Shapes) -> Workload:
    return Workload(
        f"fingerprints, {name}", shapes, BF16.itemsize, fingerprints_of, only_reads=True
    )


WORKLOADS = {
    "cpu": [
        work("bf16, 64 x 1,048,576", BIG, BF16),
        work("fp32, 64 x 1,048,576", BIG, F32),
        work("bf16, 16,384 x 256", SMALL, BF16),
        fingerprint_work("bf16, 64 x 1,048,576", BIG),
        fingerprint_work("bf16, 16,384 x 256", SMALL),
    ],
    "cuda": [
        work("bf16, Llama shapes", llama(8, embedding=True), BF16),
        work("fp32, Llama shapes", llama(8, embedding=True), F32),
        work("bf16, 10,000 x 1,024", [(1024,)] * 10_000, BF16),
        fingerprint_work("bf16, Llama shapes", llama(8, embedding=True)),
        fingerprint_work("bf16, 10,000 x 1,024", [(1024,)] * 10_000),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
