"""Shapes and options of routing that its tests share."""

from typing import Any

from samples import F32, make
from torch import Tensor

# Tokens, experts, k, and groups of which some are chosen.
SHAPES = [
    (0, 8, 2, 4, 2),
    (37, 8, 2, 1, 1),
    (100, 128, 8, 1, 1),
    (33, 256, 8, 8, 4),
    (50, 160, 6, 8, 3),
    (41, 60, 4, 1, 1),
    (5, 1, 1, 1, 1),
    (20, 512, 512, 1, 1),
    (6, 1024, 33, 32, 20),
    (9, 12, 3, 12, 4),
    (1, 33, 32, 1, 1),
    (0, 8, 2, 1, 1),
]
SCORES = ["softmax", "sigmoid", "softmax_topk"]
DROPS: list[dict[str, Any]] = [
    {},
    dict(capacity=3),
    dict(capacity=2, keep="random", seed=7),
    dict(capacity=0),
]


def bias_of(experts: int, device: str) -> Tensor:
    return make((experts,), F32, 9, device) * 0.1


def wide(tensor: Tensor) -> Tensor:
    """A leaf in float64, on the CPU."""
    return tensor.detach().cpu().double().requires_grad_()


def integers_of(routing: Any) -> list[Tensor]:
    names = ("experts", "slots", "offsets", "counts", "first_counts")
    return [getattr(routing, name).cpu() for name in names]


def floats_of(routing: Any) -> list[Tensor]:
    return [routing.weights, routing.probability_sums, routing.z_sum]


def random_like(tensors: list[Tensor]) -> list[Tensor]:
    return [make(tuple(t.shape), F32, 60 + i).to(t) for i, t in enumerate(tensors)]
