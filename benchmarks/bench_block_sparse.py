"""block_sparse_attention beside dense attention: `python -m benchmarks.bench_block_sparse`.

Each row of blocks names as many others, at random. What dense attention takes times the density of
the layout is measured as dense attention of so many of the heads; beside it is that of all.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import block_sparse_attention


def layout_of(tokens: int, block: int, density: float, device: str) -> Tensor:
    """Return a layout for all heads."""
    n = tokens // block
    layout = torch.zeros(1, n, n, dtype=torch.bool)
    for row in layout[0]:
        row[torch.randperm(n)[: round(n * density)]] = True
    return layout.to(device)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By torch's flash attention, on both devices."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def contender(
    name: str, way: Callable[..., Tensor], given: list[Tensor], backward: bool
) -> Contender:
    """Return one that calls `way`, with gradients or without."""
    if not backward:
        return Contender(name, torch.no_grad()(lambda: way(*given)))
    leaves = [t.requires_grad_() for t in given]
    grad = torch.randn_like(given[0])
    return Contender(name, lambda: torch.autograd.grad(way(*leaves), leaves, grad))


def contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, block: int, density: float, backward: bool
) -> list[Contender]:
    """Return ours, and dense attention of as many pairs of tokens and of all."""
    (shape,) = shapes
    batch, heads, tokens, width = shape

    def made(heads: int) -> list[Tensor]:
        drawn = (torch.randn((batch, heads, tokens, width), device=device) for _ in range(3))
        return [t.to(dtype) for t in drawn]

    ours = partial(
        block_sparse_attention, layout=layout_of(tokens, block, density, device), block=block
    )
    few = round(heads * density)
    return [
        contender("block_sparse_attention", ours, made(heads), backward),
        contender(f"torch, dense, {few} of {heads} heads", dense, made(few), backward),
        contender("torch, dense", dense, made(heads), backward),
    ]


def works(shape: tuple[int, ...], dtype: torch.dtype, block: int, density: float) -> list[Workload]:
    """Return the work of forward, and of both directions."""
    what = f"{str(dtype).partition('.')[2]}, {' x '.join(f'{n:,}' for n in shape)}"
    what += f", block {block}, density {density}"
    made = partial(contenders, dtype=dtype, block=block, density=density)
    return [  # the least that can be read and written
        Workload(f"forward, {what}", [shape], 4 * dtype.itemsize, partial(made, backward=False)),
        Workload(
            f"forward and backward, {what}",
            [shape],
            12 * dtype.itemsize,
            partial(made, backward=True),
        ),
    ]


ON_CPU, ON_CUDA = (1, 8, 4096, 64), (1, 16, 16384, 64)
WORKLOADS = {
    "cpu": [
        *works(ON_CPU, F32, 64, 0.25),
        *works(ON_CPU, F32, 16, 0.25),
        *works(ON_CPU, F32, 128, 0.25),
        *works(ON_CPU, BF16, 64, 0.25),
    ],
    "cuda": [
        work
        for block in (128, 64, 32, 16)
        for density in (0.125, 0.5)
        for work in works(ON_CUDA, BF16, block, density)
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
