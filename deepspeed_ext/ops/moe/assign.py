"""Rows for the choices of tokens: experts one after the other, and no more than each has room."""

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import check_numbers, define
from deepspeed_ext.ops.moe.routing import LIBRARIES, Routing

_KEEPS = ("order", "random")
_HALF = 0xFFFFFFFF


def fake_rows(experts: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Return slots, offsets, counts and counts of first choices, to be filled."""
    counts = experts.new_empty((num_experts,))
    offsets = experts.new_empty((num_experts,), dtype=torch.int32)
    return experts.new_empty(experts.shape), offsets, counts, torch.empty_like(counts)


def _fake(
    experts: Tensor, seed: Tensor | None, *, num_experts: int, capacity: int | None
) -> tuple[Tensor, ...]:
    return fake_rows(experts, num_experts)


_op = define(
    "moe_assign(Tensor experts, Tensor? seed, *, int num_experts, SymInt? capacity)"
    " -> (Tensor slots, Tensor offsets, Tensor counts, Tensor first_counts)",
    LIBRARIES,
    fake=_fake,
)


def moe_assign(
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    keep: str = "order",
    seed: int | Tensor = 0,
) -> Routing:
    """Return the routing of tokens whose experts have been chosen already.

    Rows lie expert by expert. Those of an expert are its first choices, then its second ones, and
    so on, each in the order of tokens, or in a random one. What it has no room for is dropped: the
    last of these. All of it is integers, the same on both devices.

    Args:
        experts: (..., k), int64, on the CPU or on CUDA: expert numbers, of which a token may have
            the same one twice. A number that is no expert's is a choice that is dropped and not
            counted.
        weights: (..., k), float32, bfloat16 or float16, which become those of the routing.
        num_experts: 1 to 1024.
        capacity: how many rows an expert has at the most. None: all that there are.
        keep: "order" of tokens, or "random": one that follows from the seed.
        seed: of 64 bits, a number or an int64 tensor with one, which nobody waits for. Used if keep
            is "random".

    Returns:
        The routing, without the terms of losses.

    See: ``moe_assign_ref`` is the same in plain torch.
    """
    check_kinds("moe_assign", experts=(experts, Tensor), weights=(weights, Tensor))
    if weights.shape != experts.shape:
        raise ValueError(
            f"moe_assign: weights has shape {list(weights.shape)}, expected"
            f" {list(experts.shape)}, that of experts"
        )
    slots, offsets, counts, first_counts = _op(
        experts,
        seed_of("moe_assign", keep, seed, experts),
        num_experts=num_experts,
        capacity=capacity,
    )
    rows = rows_of(slots, num_experts, capacity)
    return Routing(experts, weights, slots, offsets, counts, first_counts, rows)


def seed_of(op: str, keep: str, seed: int | Tensor, beside: Tensor) -> Tensor | None:
    """Return the seed of a random order, where `beside` is; None: tokens are in their order."""
    if keep not in _KEEPS:
        raise ValueError(f"{op}: keep is {keep!r}, expected 'order' or 'random'")
    if keep == "order":
        return None
    if isinstance(seed, Tensor):
        return seed
    check_numbers(op, True, seed=seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"{op}: seed is {seed}, expected a number of 64 bits")
    signed = seed - (1 << 64) if seed >> 63 > 0 else seed
    return torch.full((), signed, dtype=torch.int64, device=beside.device)


def rows_of(slots: Tensor, num_experts: int, capacity: int | None) -> int:
    """Return how many rows a permuted tensor has."""
    rows = slots.numel()
    return rows if capacity is None else min(rows, num_experts * capacity)


def moe_assign_ref(
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    keep: str = "order",
    seed: int | Tensor = 0,
) -> Routing:
    """Do what moe_assign does, in plain torch: its definition, for tests."""
    tokens, k = experts.shape[:-1].numel(), experts.shape[-1]
    order = torch.arange(tokens)
    if keep == "random":
        order = random_order_ref(tokens, int(seed))
    by_rank = experts.reshape(tokens, k)[order.to(experts.device)].t().flatten()
    is_one = torch.nn.functional.one_hot(
        by_rank.where((by_rank >= 0) & (by_rank < num_experts), num_experts), num_experts + 1
    )[:, :-1]
    counts = is_one.sum(0)
    kept = counts if capacity is None else counts.clamp(max=capacity)
    offsets = kept.cumsum(0)
    place = ((is_one.cumsum(0) - 1) * is_one).sum(-1)
    expert = is_one.argmax(-1) if num_experts else place
    fits = is_one.any(-1) & (place < kept[expert])
    rows = (offsets - kept)[expert] + place
    slots = torch.empty_like(by_rank).view(k, tokens)
    slots[:, order.to(experts.device)] = rows.where(fits, -1).view(k, tokens)
    return Routing(
        experts,
        weights,
        slots.t().reshape(experts.shape),
        offsets.int(),
        counts,
        is_one[:tokens].sum(0),
        rows_of(experts, num_experts, capacity),
    )


def random_order_ref(tokens: int, seed: int) -> Tensor:
    """Return all token numbers in the order of a seed: csrc/moe/assign.h says the same."""
    x = seed & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & (1 << 64) - 1
    x ^= x >> 31
    keys = (x & _HALF, x >> 32)
    half = ((tokens - 1).bit_length() + 1) // 2 if tokens else 0
    low = (1 << half) - 1

    def mixed(value: Tensor, key: int) -> Tensor:
        value = (value + key) & _HALF
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            value = (value ^ value >> shift) * factor & _HALF
        return value ^ value >> 16

    places = torch.arange(tokens)
    outside = torch.ones(tokens, dtype=torch.bool)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & low
        for turn in range(6):
            key = (keys[turn % 2] + turn * 0x9E3779B9) & _HALF
            left, right = right, left ^ mixed(right, key) & low
        places[outside] = left << half | right
        outside = places >= tokens
    return places
