"""Tokens out of a batch and back: `python -m benchmarks.bench_random_ltd --device cuda`."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import Shape, copies_of, copy_contender, forward_contender
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import gpt_sample_tokens, token_gather, token_scatter, token_scatter_

Ways = Mapping[str, Callable[..., object]]


def rows_of(ids: Tensor, n: int) -> Tensor:
    """Return ids as torch's gather and scatter want them."""
    return ids.long()[..., None].expand(*ids.shape, n)


def contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, kept: int, what: str, calls: int
) -> list[Contender]:
    """Return ours, torch's ways, and a copy of as many bytes."""
    (shape,) = shapes
    samples, tokens, n = shape
    ids = gpt_sample_tokens(kept, tokens, samples, device=device)[0][0]
    rows, batch = rows_of(ids, n), torch.arange(samples, device=device)[:, None]
    long = ids.long()
    operands = [
        [torch.randn(shape, device=device, dtype=dtype),
         torch.randn(samples, kept, n, device=device, dtype=dtype)]
        for _ in range(copies_of(shape, dtype, device))
    ]  # fmt: skip
    ways: dict[str, Ways] = {
        "gather": {
            "token_gather": lambda x, part: token_gather(x, ids),
            "torch, gather": lambda x, part: x.gather(1, rows),
            "torch, indexed": lambda x, part: x[batch, long],
        },
        "scatter in place": {
            "token_scatter_": lambda x, part: token_scatter_(x, part, ids),
            "torch, scatter_": lambda x, part: x.scatter_(1, rows, part),
            "torch, indexed": lambda x, part: x.index_put_((batch, long), part),
        },
        "scatter": {
            "token_scatter": lambda x, part: token_scatter(x, part, ids),
            "torch, scatter": lambda x, part: x.scatter(1, rows, part),
        },
    }
    made = [
        forward_contender(name, way, operands, device, calls) for name, way in ways[what].items()
    ]
    passes = 2.0 if what == "scatter" else 2 * kept / tokens
    return [*made, copy_contender(passes, shape, dtype, device, calls)]


def moved(shape: Shape, kept: int, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    """There, back in place, and back as a new tensor."""
    sizes = " x ".join(f"{size:,}" for size in shape)
    of_kept = 2 * kept * dtype.itemsize * calls // shape[1]
    passes = {"gather": of_kept, "scatter in place": of_kept, "scatter": 2 * dtype.itemsize * calls}
    name = f"{kept:,} tokens of {sizes}, {str(dtype).partition('.')[2]}"
    return [
        Workload(
            f"{what}, {name}" + f", {calls} times" * (calls > 1),
            [shape],
            each,
            partial(contenders, dtype=dtype, kept=kept, what=what, calls=calls),
        )
        for what, each in passes.items()
    ]


WORKLOADS = {
    "cpu": [*moved((8, 1024, 1024), 512, BF16), *moved((8, 1024, 1024), 512, F32)],
    "cuda": [
        *moved((32, 2048, 1024), 1024, BF16, calls=20),
        *moved((8, 2048, 4096), 512, BF16, calls=20),
        *moved((32, 2048, 1001), 1024, BF16, calls=20),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
