"""Clipped and compact steps, ours and torch's: `python -m benchmarks.bench_clip --device cpu`.

bf16 gradients, scaled; float32 master weights and moments; bf16 weights: norm, clipping, unscaling,
AdamW and rounding. And the same model with 8-bit moments and split weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bench_steps import LOSS_SCALE, TORCH, divide_gradients, ours, step_of, theirs
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, BIG, F32, Shapes, Workload, leaves, llama, main

MAX_NORM = 1.0


def clipped(shapes: Shapes, device: str) -> list[Contender]:
    optimizer = ours(leaves(shapes, BF16, device), master="float32")
    divide_gradients(optimizer, device)
    made = [
        Contender("clip_and_step", lambda: optimizer.clip_and_step(MAX_NORM)),
        clipped_by_torch(shapes, device, "torch at its best", into_buffers),
    ]
    if device == "cpu":  # on a GPU there is no room for a third
        made.append(clipped_by_torch(shapes, device, "torch, plainly", plainly))
    return made


def clipped_by_torch(shapes: Shapes, device: str, name: str, how: Callable[..., None]) -> Contender:
    """AdamW(fused=True) on float32 originals of bf16 weights, with clipping before."""
    weights = [torch.randn(shape, dtype=BF16, device=device) for shape in shapes]
    grads = [torch.randn_like(weight) for weight in weights]
    originals = [weight.float().requires_grad_() for weight in weights]
    for original in originals:
        original.grad = torch.empty_like(original)
    optimizer = theirs(originals)
    if how is into_buffers:
        divide_gradients(optimizer, device)

    @torch.no_grad()
    def run() -> None:
        how(weights, grads, originals, optimizer)

    return Contender(name, run)


def into_buffers(
    weights: list[Tensor],
    grads: list[Tensor],
    originals: list[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Torch's functions for lists, into memory that is there; the step divides by the scale."""
    torch._foreach_copy_([original.grad for original in originals], grads)
    torch.nn.utils.clip_grad_norm_(originals, MAX_NORM * LOSS_SCALE, foreach=True)
    optimizer.step()
    torch._foreach_copy_(weights, originals)


def plainly(
    weights: list[Tensor],
    grads: list[Tensor],
    originals: list[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """As it is written down when nobody looks at the time."""
    for original, grad in zip(originals, grads, strict=True):
        original.grad = grad.float() / LOSS_SCALE
    torch.nn.utils.clip_grad_norm_(originals, MAX_NORM)
    optimizer.step()
    for weight, original in zip(weights, originals, strict=True):
        weight.copy_(original)


def compact(shapes: Shapes, device: str) -> list[Contender]:
    small = ours(leaves(shapes, BF16, device), state_dtype=torch.uint8, master="remainder")
    return [
        step_of(small, "8-bit moments, split weights"),
        step_of(ours(leaves(shapes, F32, device)), "ours in float32"),
        step_of(theirs(leaves(shapes, F32, device)), TORCH),
    ]


WORKLOADS = {
    "cpu": [
        Workload("clipped step, 64 x 1,048,576", BIG, 30, clipped),
        Workload("compact step, 64 x 1,048,576", BIG, 14, compact),
    ],
    "cuda": [
        Workload("clipped step, Llama shapes", llama(8, embedding=True), 30, clipped),
        Workload("compact step, Llama shapes", llama(8, embedding=True), 14, compact),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
