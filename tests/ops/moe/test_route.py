"""moe_route and moe_assign: choices, weights, slots and gradients, beside the references."""

from typing import Any

import pytest
import torch
from route_cases import DROPS, SCORES, SHAPES, bias_of, floats_of, integers_of, random_like, wide
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within

from deepspeed_ext.ops import moe_route, moe_route_ref

ROUNDING = torch.finfo(F32).eps / 2


def assert_right(logits: torch.Tensor, k: int, **options: Any) -> None:
    """Compare all results and the gradient with the reference, element by element."""
    device, n = logits.device, logits.shape[-1]
    leaf, right = logits.detach().requires_grad_(), wide(logits)
    got = moe_route(leaf, k, **options)
    on_host = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in options.items()}
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
    assert_right(torch.zeros(4, 8, dtype=BF16, device=device) * -1, 8)
