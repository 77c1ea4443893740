"""moe_route and moe_assign: choices, weights, slots and gradients, beside the references."""

from typing import Any

import pytest
import torch
from route_cases import DROPS, SCORES, SHAPES, bias_of, floats_of, integers_of, random_like, wide
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import (
    moe_assign,
    moe_assign_ref,
    moe_load_balancing_loss,
    moe_route,
    moe_route_ref,
    moe_z_loss,
)
from deepspeed_ext.ops.moe.assign import random_order_ref

ROUNDING = torch.finfo(F32).eps / 2


def assert_right(logits: Tensor, k: int, **options: Any) -> None:
    """Compare all results and the gradient with the reference, element by element."""
    device, n = logits.device, logits.shape[-1]
    leaf, right = logits.detach().requires_grad_(), wide(logits)
    got = moe_route(leaf, k, **options)
    on_host = {key: v.cpu() if isinstance(v, Tensor) else v for key, v in options.items()}
    want = moe_route_ref(right, k, **on_host)
    for value, expected in zip(integers_of(got), integers_of(want), strict=True):
        assert value.dtype == expected.dtype and torch.equal(value, expected)
    assert got.rows == want.rows
    size = float(right.detach().abs().max()) if right.numel() else 0.0
    relative = ROUNDING * (40 + 8 * size + n / 16)
    tokens = max(right.shape[:-1].numel(), 1)
    bounds = [relative, relative * tokens**0.5, relative * 4]
    for value, expected, bound in zip(floats_of(got), floats_of(want), bounds, strict=True):
        assert value.dtype == F32 and value.shape == expected.shape and value.device == device
        expected = expected.detach()
        assert_within("result", value.detach().cpu(), expected, bound * expected.abs() + 1e-37)
    grads = random_like(floats_of(want))
    (grad,) = torch.autograd.grad(floats_of(got), leaf, [g.float().to(device) for g in grads])
    (expected,) = torch.autograd.grad(floats_of(want), right, grads)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    assert_within(
        "gradient", grad.cpu(), expected, relative * 8 * torch.full_like(expected, largest)
    )


@pytest.mark.parametrize("drops", DROPS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(
    shape: tuple[int, ...], score: str, normalize: bool, drops: dict[str, Any], device: str
) -> None:
    tokens, experts, k, groups, topk_groups = shape
    logits = make((tokens, experts), F32, 0, device)
    options = dict(score=score, normalize=normalize, groups=groups, topk_groups=topk_groups)
    for bias in (None, bias_of(experts, device)):
        assert_right(logits, k, bias=bias, scale=2.5, **options, **drops)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_ties(dtype: torch.dtype, device: str) -> None:
    """Of equal logits, of which 16 bits have many, the lower number is first."""
    logits = (make((300, 64), F32, 0, device) * 8).round().div(8).to(dtype)
    for score in SCORES:
        assert_right(logits, 8, score=score, capacity=30)
    assert_right(torch.zeros_like(logits), 5, normalize=True)
    signed = torch.zeros(4, 8, dtype=BF16, device=device)
    signed[:, ::2] = -0.0
    assert_right(signed, 8)


@pytest.mark.parametrize("score", SCORES)
def test_layouts(score: str, device: str) -> None:
    """The results are those of contiguous copies, bit for bit, gradients too."""
    for layout in LAYOUTS.values():
        logits = layout(make((48, 200), F32, 0, device))
        k = min(3, logits.shape[-1])
        want = _all_of(logits.contiguous(), k, score=score, capacity=9)
        got = _all_of(logits, k, score=score, capacity=9)
        assert all(map(torch.equal, got, want))


def _all_of(logits: Tensor, k: int, **options: Any) -> list[Tensor]:
    """Return all results, and the gradient."""
    leaf = logits.detach().requires_grad_()
    routing = moe_route(leaf, k, **options)
    grads = [g.to(logits.device) for g in random_like(floats_of(routing))]
    grad = torch.autograd.grad(floats_of(routing), leaf, grads)
    return [*integers_of(routing), *(t.detach() for t in floats_of(routing)), *grad]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts", [8, 60, 128, 500])
def test_a_token_is_the_same_in_any_batch(experts: int, score: str, device: str) -> None:
    logits = make((67, experts), BF16, 0, device)
    options: dict[str, Any] = dict(score=score, bias=bias_of(experts, device), normalize=True)
    want = moe_route(logits, 4, **options)
    room = torch.full((6 * experts + 1,), float("nan"), dtype=BF16, device=device)
    moved = room[1:].view(6, experts)
    moved[1:] = logits[-5:]
    for some, part in ((logits[33:34], slice(33, 34)), (logits[33], 33), (moved, slice(-5, None))):
        got = moe_route(some, 4, **options)
        count = len(want.experts[part]) if isinstance(part, slice) else 4
        assert torch.equal(got.experts[-count:], want.experts[part])
        assert torch.equal(got.weights[-count:], want.weights[part])


@pytest.mark.parametrize("drops", DROPS, ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_what_is_not_finite(score: str, drops: dict[str, Any], device: str) -> None:
    """NaN is first, slots are valid, and other tokens are what they are without."""
    inf, nan = float("inf"), float("nan")
    logits = make((40, 12), F32, 0, device)
    clean = moe_route(logits, 3, score=score)
    logits[3, 5], logits[4, 2:6], logits[5, 7], logits[6] = nan, nan, inf, -inf
    logits[7, 3:], logits[8], logits[9, 1] = -inf, nan, -inf
    for groups in (1, 4):
        options: dict[str, Any] = dict(score=score, groups=groups, topk_groups=min(groups, 2))
        got, want = (f(logits.cpu() if f is moe_route_ref else logits, 3, **options, **drops)
                     for f in (moe_route, moe_route_ref))  # fmt: skip
        for value, expected in zip(integers_of(got), integers_of(want), strict=True):
            assert torch.equal(value, expected)
        weights, expected = got.weights.cpu().double(), want.weights
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        taken = got.slots[got.slots >= 0].sort().values
        assert torch.equal(taken, torch.arange(int(got.offsets[-1]), device=device))
        assert not got.z_sum.isfinite() and got.probability_sums.isnan().any()
        if groups == 1:
            rest = [*range(3), *range(10, 40)]
            assert torch.equal(got.experts[rest], clean.experts[rest])
            assert torch.equal(got.weights[rest], clean.weights[rest])
            assert got.experts[4].tolist() == [2, 3, 4] and got.experts[8].tolist() == [0, 1, 2]
            assert got.experts[5, 0] == 7 and got.experts[6].tolist() == [0, 1, 2]


def test_huge_and_tiny(device: str) -> None:
    for score in SCORES:
        for size, far in ((1e-30, 0.0), (1e4, 0.0), (1.0, 1e5), (1e30, -2e38)):
            logits = make((9, 40), F32, 0, device).clamp(-1, 1) * size + far
            got, want = (
                moe_route(logits, 4, score=score),
                moe_route_ref(logits.cpu(), 4, score=score),
            )
            if score != "sigmoid" and size <= 1e4 and far == 0:
                assert torch.equal(got.experts.cpu(), want.experts)
            assert got.weights.isfinite().all() and (got.weights >= 0).all()
            best = logits.double().gather(-1, got.experts)
            assert (best.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17, 1000, 1025, 4097])
def test_a_random_order_has_each_token_once(tokens: int, device: str) -> None:
    """All tokens want one expert, so that slots are the order of tokens."""
    experts = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    weights = torch.ones(tokens, 1, device=device)
    orders = set()
    for seed in (0, 1, -1, 2**62, 2**64 - 2, torch.tensor([5], device=device)):
        options: dict[str, Any] = dict(keep="random", seed=seed)
        slots = moe_assign(experts, weights, 1, **options).slots.flatten()
        assert torch.equal(slots.sort().values, torch.arange(tokens, device=device))
        want = random_order_ref(tokens, int(seed))
        assert torch.equal(slots.cpu()[want], torch.arange(tokens))
        assert torch.equal(moe_assign(experts, weights, 1, **options).slots.flatten(), slots)
        orders.add(tuple(slots.tolist()))
    assert len(orders) == 6 or tokens < 16


@pytest.mark.long
def test_a_random_order_is_fair() -> None:
    """Each token has each place as often as others, and pairs come in both orders."""
    tokens, seeds = 7, 6000
    places = torch.stack([random_order_ref(tokens, seed) for seed in range(seeds)])
    often = torch.nn.functional.one_hot(places, tokens).sum(0) / seeds
    assert (often - 1 / tokens).abs().max() < 5 * (1 / tokens / seeds) ** 0.5
    where = places.argsort(-1)
    for a in range(1, tokens):
        assert abs((where[:, a] < where[:, 0]).double().mean() - 0.5) < 5 * 0.5 / seeds**0.5


def test_numbers_that_are_no_experts(device: str) -> None:
    """They are dropped and not counted; a token may have one expert twice."""
    experts = torch.tensor([[0, 0], [3, -1], [4, 2], [2**40, 3], [-(2**40), 0]], device=device)
    weights = torch.ones(5, 2, device=device)
    for options in ({}, dict(capacity=1), dict(capacity=2**40), dict(keep="random", seed=3)):
        got = moe_assign(experts, weights, 4, **options)
        want = moe_assign_ref(experts.cpu(), weights, 4, **options)
        assert got.rows == want.rows
        for value, expected in zip(integers_of(got), integers_of(want), strict=True):
            assert torch.equal(value, expected)
    assert got.counts.tolist() == [3, 0, 1, 2] and got.first_counts.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("way", ["one expert", "all alike", "three choices"])
def test_many_tokens(way: str, device: str) -> None:
    """A million, over which sums are exact to a few units."""
    tokens, k = 1_000_000, 3 if way == "three choices" else 1
    logits = make((1000, 4), F32, 0, device).repeat(tokens // 1000, 1)
    if way == "one expert":
        logits[:, 1] = 20
    if way == "all alike":
        logits.zero_()
    got = moe_route(logits, k, capacity=300_001)
    (want,) = [moe_route_ref(logits[:1000].cpu(), k)]
    many = tokens // 1000
    assert torch.equal(got.counts.cpu(), want.counts * many)
    assert torch.equal(got.first_counts.cpu(), want.first_counts * many)
    torch.testing.assert_close(
        got.probability_sums.cpu().double(), want.probability_sums * many, rtol=2e-6, atol=1e-6
    )
    torch.testing.assert_close(got.z_sum.cpu().double(), want.z_sum * many, rtol=2e-6, atol=0)
    kept = got.counts.clamp(max=300_001).cumsum(0)
    assert torch.equal(got.offsets.long(), kept)
    order, valid = got.slots.t().flatten(), got.experts.t().flatten()
    for expert in range(4):  # from the first choice and token on, without gaps
        begin, end = int(kept[expert] - got.counts[expert].clamp(max=300_001)), int(kept[expert])
        slots = order[valid == expert]
        assert torch.equal(slots[: end - begin], torch.arange(begin, end, device=device))
        assert (slots[end - begin :] == -1).all()


def test_losses(device: str) -> None:
    """As in transformers and DeepSpeed; 1 if balanced; 0 for no tokens."""
    logits = make((3, 40, 8), F32, 0, device).requires_grad_()
    routing = moe_route(logits, 2)
    probability = logits.double().softmax(-1).view(-1, 8)
    chosen = torch.nn.functional.one_hot(probability.topk(2).indices, 8).double()
    for first, share in ((False, chosen.sum(1).mean(0) / 2), (True, chosen[:, 0].mean(0))):
        got = moe_load_balancing_loss(routing, first_choices=first)
        want = 8 * (probability.mean(0) * share).sum()
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
        pair = [torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (got, want)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-7)
    z = logits.double().logsumexp(-1).square().mean()
    torch.testing.assert_close(moe_z_loss(routing).double(), z, rtol=1e-5, atol=0)
    alike = moe_route(torch.eye(8, device=device), 1)
    assert abs(float(moe_load_balancing_loss(alike)) - 1) < 1e-6
    none = moe_route(logits[:, :0], 2)
    assert moe_load_balancing_loss(none) == 0 and moe_z_loss(none) == 0


@pytest.mark.parametrize("seed", range(5))
def test_as_topk_chooses(seed: int, device: str) -> None:
    """What torch's topk returns where nothing is equal."""
    logits = make((200, 64), F32, seed, device)
    want = logits.softmax(-1).topk(8)
    got = moe_route(logits, 8)
    assert torch.equal(got.experts, want.indices)
    torch.testing.assert_close(got.weights, want.values, rtol=1e-5, atol=1e-7)
