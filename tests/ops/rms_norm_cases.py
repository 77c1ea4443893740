"""Inputs of rms_norm for the tests, and a digest of its results."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops import rms_norm

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
# Around the vectors, the running sums, and what a warp, four, sixteen of them hold in registers.
LENGTHS = [1, 2, 7, 8, 16, 31, 32, 33, 129, 256, 1000, 1024, 1032, 4096, 4100]
LONG = [16384, 16392, 40_001]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """Ordinary values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def gradients(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, grads: tuple[Tensor, ...], f: Any
) -> list[Tensor]:
    """Return the results of f, rms_norm or its reference, then all gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, residual) if t is not None]
    others = iter(leaves[1:])
    options = {"weight": next(others)} if weight is not None else {}
    if residual is not None:
        options["residual"] = next(others)
    results = f(leaves[0], **options)
    results = (results,) if isinstance(results, Tensor) else results
    found = torch.autograd.grad(
        results, leaves, [g.to(r.dtype) for g, r in zip(grads, results, strict=False)]
    )
    return [result.detach() for result in results] + list(found)


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results and gradients, of every dtype and length."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for n in [*LENGTHS, 20_000]:
            x, residual, *grads = (make((70, n), dtype, seed, device) for seed in range(4))
            weight = make((n,), dtype, 9, device)
            for tensor in gradients(x, weight, residual, tuple(grads), rms_norm):
                found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(digest())
