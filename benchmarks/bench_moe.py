"""Tokens to their experts and back: `python -m benchmarks.bench_moe --device cuda`."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.functional import (
    Shape,
    backward_contender,
    copies_of,
    copy_contender,
    forward_contender,
)
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import Routing, moe_assign, moe_permute, moe_route, moe_unpermute

Ways = Mapping[str, Callable[..., object]]


def torchs_route(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """All that moe_route returns, by a stable sort."""
    probability = logits.float().softmax(-1)
    weights, experts = probability.topk(k)
    by_rank = experts.t().flatten()
    order = by_rank.argsort(stable=True)
    slots = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    first_counts = counts.scatter_add(0, experts[:, 0], torch.ones_like(experts[:, 0]))
    counts = counts.scatter_add(0, by_rank, torch.ones_like(by_rank))
    z_sum = logits.float().logsumexp(-1).square().sum()
    offsets = counts.cumsum(0, dtype=torch.int32)
    slots = slots.view(k, -1).t().contiguous()
    return experts, weights, slots, offsets, counts, first_counts, probability.sum(0), z_sum


def torchs_unpermute(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return (y[slots].float() * weights[..., None]).sum(1).to(y.dtype)


def routing_of(tokens: int, experts: int, k: int, device: str) -> Routing:
    return moe_route(torch.randn(tokens, experts, device=device), k)


def route_contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, k: int, calls: int
) -> list[Contender]:
    (shape,) = shapes
    copies = copies_of(shape, dtype, device)
    operands = [[torch.randn(shape, device=device, dtype=dtype)] for _ in range(copies)]
    ways: Ways = {
        "moe_route": partial(moe_route, k=k, normalize=True),
        "torch": partial(torchs_route, k=k),
        "torch, compiled": torch.compile(partial(torchs_route, k=k), dynamic=False),
    }
    made = [forward_contender(name, way, operands, device, calls) for name, way in ways.items()]
    return [*made, copy_contender(1, shape, dtype, device, calls)]


def permute_contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, k: int, calls: int
) -> list[Contender]:
    (shape,) = shapes
    routing = routing_of(shape[0], 128, k, device)
    tokens = routing.slots.flatten().argsort() // k
    copies = copies_of(shape, dtype, device)
    operands = [[torch.randn(shape, device=device, dtype=dtype)] for _ in range(copies)]
    ways: Ways = {
        "moe_permute": lambda x: moe_permute(x, routing),
        "torch, index_select": lambda x: x.index_select(0, tokens),
    }
    made = [forward_contender(name, way, operands, device, calls) for name, way in ways.items()]
    return [*made, copy_contender(1 + k, shape, dtype, device, calls)]


def unpermute_contenders(
    shapes: Shapes, device: str, dtype: torch.dtype, k: int, calls: int, backward: bool
) -> list[Contender]:
    (shape,) = shapes
    routing = routing_of(shape[0], 128, k, device)
    y = torch.randn(routing.rows, shape[1], device=device, dtype=dtype)
    compiled = torch.compile(torchs_unpermute, dynamic=False)
    ways: Ways = {
        "moe_unpermute": lambda y, weights: moe_unpermute(y, routing, weights),
        "torch, compiled": lambda y, weights: compiled(y, routing.slots, weights),
        "torch": lambda y, weights: torchs_unpermute(y, routing.slots, weights),
    }
    leaves = [y, routing.weights.detach()]
    if backward:
        leaves = [leaf.requires_grad_() for leaf in leaves]
        made = [backward_contender(name, way, leaves, device, calls) for name, way in ways.items()]
        return [*made, copy_contender(1 + 2 * k, shape, dtype, device, calls)]
    made = [forward_contender(name, way, [leaves], device, calls) for name, way in ways.items()]
    return [*made, copy_contender(1 + k, shape, dtype, device, calls)]


def assign_contenders(shapes: Shapes, device: str, experts: int, calls: int) -> list[Contender]:
    (shape,) = shapes
    routing = routing_of(shape[0], experts, shape[1], device)
    ways: Ways = {
        "moe_assign": lambda chosen, w: moe_assign(chosen, w, experts, capacity=2 * shape[0]),
        "moe_assign, in a random order": lambda chosen, w: moe_assign(
            chosen, w, experts, capacity=2 * shape[0], keep="random"
        ),
        "torch, argsort": lambda chosen, w: chosen.flatten().argsort(stable=True),
    }
    operands = [[routing.experts, routing.weights]]
    return [forward_contender(name, way, operands, device, calls) for name, way in ways.items()]


def named(what: str, dtype: torch.dtype, sizes: tuple[int, ...], calls: int) -> str:
    name = f"{what}, {str(dtype).partition('.')[2]}, {' x '.join(f'{n:,}' for n in sizes)}"
    return name + f", {calls} times" * (calls > 1)


def moved(shape: Shape, k: int, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    """Permute, unpermute, and its gradients."""
    options = dict(dtype=dtype, k=k, calls=calls)
    sizes, each = (shape[0], k, shape[1]), dtype.itemsize * calls
    made = {
        "permute": (1 + k, partial(permute_contenders, **options)),
        "unpermute": (1 + k, partial(unpermute_contenders, backward=False, **options)),
        "backward of unpermute": (
            1 + 2 * k,
            partial(unpermute_contenders, backward=True, **options),
        ),
    }
    return [
        Workload(named(what, dtype, sizes, calls), [shape], passes * each, run)
        for what, (passes, run) in made.items()
    ]


def routed(shape: Shape, k: int, dtype: torch.dtype, calls: int = 1) -> list[Workload]:
    """The choice of experts with its rows, and the rows alone."""
    tokens, experts = shape
    run = partial(route_contenders, dtype=dtype, k=k, calls=calls)
    assign = partial(assign_contenders, experts=experts, calls=calls)
    return [
        Workload(named("route", dtype, (*shape, k), calls), [shape], dtype.itemsize * calls, run),
        Workload(named("assign", dtype, (*shape, k), calls), [(tokens, k)], 16 * calls, assign),
    ]


WORKLOADS = {
    "cpu": [*moved((1024, 4096), 8, BF16), *routed((16_384, 128), 8, F32)],
    "cuda": [
        *moved((4096, 7168), 8, BF16, calls=5),
        *moved((16_384, 2048), 2, BF16, calls=5),
        *routed((16_384, 128), 8, F32, calls=20),
        *routed((16_384, 256), 8, BF16, calls=20),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
