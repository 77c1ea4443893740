"""bias_dropout_residual and dropout_activation: numbers, masks and rates, and what they refuse."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from activation_cases import NAMES, ROUNDING, errors_of
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.ops import (
    bias_dropout_residual,
    bias_dropout_residual_ref,
    dropout_activation,
    dropout_activation_ref,
)
from deepspeed_ext.ops._dropout import kept_ref

SEEDS = (0, 1, 0x123456789ABCDEF, 2**63 - 2, -5)
OPS = {
    "bias_dropout_residual": (bias_dropout_residual, bias_dropout_residual_ref),
    "dropout_activation": (dropout_activation, dropout_activation_ref),
}
each_op = pytest.mark.parametrize("name", OPS)


def seed_of(number: int, device: str) -> Tensor:
    return torch.tensor([number], device=device)


def run(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return the result and the gradients of all that is there."""
    given = [None if t is None else t.detach().requires_grad_() for t in tensors]
    result = function(*given)
    leaves = [t for t in given if t is not None]
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def assert_right(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int
) -> None:
    """Compare with the reference: x + bias, the product and the sum round once each."""
    device = x.device.type
    grad = make(tuple(x.shape), x.dtype if residual is None else residual.dtype, 9, device)
    wide = [None if t is None else t.cpu().double() for t in (x, bias, residual)]
    options = dict(p=p, training=True)
    want = run(
        partial(bias_dropout_residual_ref, **options, seed=seed_of(seed, "cpu")),
        grad.cpu().double(),
        *wide,
    )
    got = run(
        partial(bias_dropout_residual, **options, seed=seed_of(seed, device)),
        grad,
        x,
        bias,
        residual,
    )
    assert got[0].dtype == grad.dtype and got[0].is_contiguous()
    scale = 1 / (1 - p) if p < 1 else 0.0
    terms = sum(t.abs() * s for t, s in zip(wide, (scale, scale, 1), strict=True) if t is not None)
    of_x = ROUNDING * 2 * scale * grad.cpu().double().abs()
    if grad.dtype != x.dtype:  # rounded twice
        of_x = of_x + torch.finfo(grad.dtype).eps * scale * grad.cpu().double().abs()
    assert_within("out", got[0].cpu(), want[0], 4 * ROUNDING * terms)
    assert_within("x", got[1].cpu(), want[1], of_x)
    if bias is not None:
        rows = x.numel() // max(1, x.shape[-1])
        sums = (min(rows, 256) + rows // 256 + 40) * ROUNDING * scale
        bound = sums * grad.cpu().double().abs().reshape(rows, x.shape[-1]).sum(0)
        assert_within("bias", got[2].cpu(), want[2], bound)
    if residual is not None:
        assert torch.equal(got[-1], grad)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 1000, 4104])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.75])
def test_values(p: float, dtype: torch.dtype, n: int, device: str) -> None:
    x, residual = (make((19, n), dtype, seed, device) for seed in range(2))
    bias = make((n,), dtype, 2, device)
    others = ((bias, residual), (bias, None), (None, residual), (None, None))
    for seed, tensors in zip(SEEDS, others, strict=False):
        assert_right(x, *tensors, p, seed)


@pytest.mark.parametrize(
    "shape", [(5,), (2, 3, 8), (0, 8), (3, 0), (259, 40), (2100, 9), (33, 9000)]
)
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    x, residual = (make(shape, F32, seed, device) for seed in range(2))
    for p in (0.0, 0.3, 1.0):
        assert_right(x, make(shape[-1:], F32, 2, device), residual, p, 3)


@pytest.mark.parametrize("others", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures(dtype: torch.dtype, others: torch.dtype, device: str) -> None:
    x, residual = make((9, 41), dtype, 0, device), make((9, 41), others, 1, device)
    assert_right(x, make((41,), BF16, 2, device), residual, 0.3, 4)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_activations(activation: str, dtype: torch.dtype, device: str) -> None:
    x, grad = (make((19, 1001), dtype, seed, device) for seed in range(2))
    x, bias, p = x * 4, make((1001,), dtype, 2, device), 0.3
    wide = [t.cpu().double() for t in (x, bias)]
    options: dict[str, Any] = dict(p=p, activation=activation)
    want = run(partial(dropout_activation_ref, **options, seed=seed_of(7, "cpu")),
               grad.cpu().double(), *wide)  # fmt: skip
    got = run(partial(dropout_activation, **options, seed=seed_of(7, device)), grad, x, bias)
    total = sum(wide)
    value, slope = errors_of(activation, total)
    rounding = ROUNDING * total.abs() + 4 * ROUNDING
    of_x = grad.cpu().double().abs() * (slope + rounding) / (1 - p) + 2 * ROUNDING * want[1].abs()
    errors = [(value + 1.2 * rounding) / (1 - p), of_x]
    errors.append(of_x.sum(0) + 60 * ROUNDING * want[1].abs().sum(0))
    for name, result, expected, error in zip(["out", "x", "bias"], got, want, errors, strict=True):
        assert_within(name, result.cpu(), expected, 2 * error + 2.0**-120)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    """The mask counts through the tensor, however that lies in memory."""
    x, residual = (LAYOUTS[layout](make((48, 200), BF16, seed, device)) for seed in range(2))
    seed = seed_of(5, device)
    want = bias_dropout_residual(x.contiguous(), None, residual.contiguous(), 0.3, seed=seed)
    assert torch.equal(bias_dropout_residual(x, None, residual, 0.3, seed=seed), want)


@each_op
def test_nothing_of_what_is_dropped_remains(name: str, device: str) -> None:
    """NaN and inf neither, in results and gradients; and all of it with p 1."""
    function, seed = OPS[name][0], seed_of(3, device)
    kept = kept_ref(seed.cpu(), 0.5, torch.empty(4, 100)).to(device) != 0
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(4, 100, device=device).masked_fill(~kept, bad).requires_grad_()
        out = function(x, p=0.5, seed=seed)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out).masked_fill(~kept, bad))
        assert (out[~kept] == 0).all() and (grad[~kept] == 0).all()
        assert out.isfinite().all() and grad.isfinite().all() and (out[kept] != 0).all()
        nothing = function(torch.full_like(x, bad).requires_grad_(), p=1, seed=seed)
        assert (nothing == 0).all()


@each_op
@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.999, 1.0])
def test_rates_are_binomial(name: str, p: float, device: str) -> None:
    """In all, in each row and each column, and of pairs at any distance."""
    rows, n = 512, 1024
    x = torch.ones(rows, n, device=device)
    for number in SEEDS:
        out = OPS[name][0](x, p=p, seed=seed_of(number, device))
        dropped = (out == 0).double().cpu()
        if p in (0.0, 1.0):
            assert (dropped == p).all()
            continue
        variance = p * (1 - p)
        for count in (dropped.sum(), dropped.sum(0), dropped.sum(1)):
            of = rows * n // count.numel()
            off = (count - p * of).abs() / math.sqrt(of * variance)
            assert off.max() < (5 if p in (0.1, 0.5) or count.numel() == 1 else 12)
        centred = (dropped.flatten() - p) / math.sqrt(variance)
        for lag in (1, 2, 16, 512, n, 4096, 1 << 16, 1 << 18):
            pairs = centred[:-lag] * centred[lag:]
            assert abs(pairs.sum() / math.sqrt(pairs.numel())) < 6, lag


def test_seeds_are_unrelated(device: str) -> None:
    x = torch.ones(1 << 18, device=device)
    masks = [bias_dropout_residual(x, p=0.5, seed=seed_of(s, device)) - 1 for s in range(8)]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert abs(float((first * second).sum())) < 6 * math.sqrt(len(x))


def test_the_mask_is_the_same_on_cuda(cuda: str) -> None:
    x = torch.ones(700, 513)
    for number in SEEDS:
        pair = [
            bias_dropout_residual(x.to(d), p=0.3, seed=seed_of(number, d)).cpu()
            for d in ("cpu", cuda)
        ]
        assert torch.equal(*pair)


@each_op
def test_the_seed_is_torchs(name: str, device: str) -> None:
    """One draw a call, which a checkpoint draws again; none where nothing is dropped."""
    function, x = OPS[name][0], make((8, 64), F32, 0, device).requires_grad_()
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(torch.stack([function(x, p=0.5) for _ in range(2)]))
    assert torch.equal(*found) and not torch.equal(*found[0])
    for use_reentrant in (False, True):
        torch.manual_seed(5)
        out = checkpoint(lambda t: function(t, p=0.5), x, use_reentrant=use_reentrant)
        torch.rand(3, device=device)
        (grad,) = torch.autograd.grad(out.sum(), x) if not use_reentrant else backward_of(out, x)
        assert torch.equal(out, found[0][0])
        assert torch.equal(grad, torch.autograd.grad(found[0][0].sum(), x, retain_graph=True)[0])
    torch.manual_seed(5)
    want = function(x, p=0)
    for still in (function(x, p=0.5, training=False), function(x, p=0.0)):
        assert torch.equal(still, want)
    assert torch.equal(function(x, p=0.5), found[0][0])


def backward_of(out: Tensor, x: Tensor) -> tuple[Tensor]:
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return (x.grad,)


def test_a_graph_draws_at_each_replay(cuda: str) -> None:
    x = torch.ones(1000, device=cuda)
    for _ in range(2):
        bias_dropout_residual(x, p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bias_dropout_residual(x, p=0.5)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(out.clone())
    assert not torch.equal(*masks) and all(400 < int((m == 0).sum()) < 600 for m in masks)


X, SEED = torch.ones(2, 4), torch.tensor([1])
REFUSED: dict[str, dict[str, Any]] = {
    "p is 1.5, expected a number from 0 to 1": dict(p=1.5),
    "p is -0.1, expected a number from 0 to 1": dict(p=-0.1, training=False),
    "p is nan, expected a number from 0 to 1": dict(p=float("nan")),
    "seed is int32, expected int64": dict(p=0.5, seed=SEED.int()),
    "seed has shape [2], expected one element": dict(p=0.5, seed=SEED.repeat(2)),
    "bias has shape [3], expected [4]": dict(bias=torch.ones(3), p=0.5),
}


@each_op
@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str, name: str) -> None:
    OPS[name][0](X)  # loads the library, so that it refuses
    with pytest.raises(ValueError, match=f"^{name}: {re.escape(text)}$"):
        OPS[name][0](X, **REFUSED[text])


def test_refuses_other_things() -> None:
    with pytest.raises(ValueError, match=r"^bias_dropout_residual: residual has shape \[4\], exp"):
        bias_dropout_residual(X, None, torch.ones(4), 0.5)
    with pytest.raises(TypeError, match=r"^dropout_activation: p is 'x', expected a number$"):
        dropout_activation(X, None, "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dropout_activation: activation is 'x', expected one"):
        dropout_activation(X, activation="x")
    text = r"^bias_dropout_residual: seed is None, expected a tensor, as p is 0.5$"
    with pytest.raises(ValueError, match=text):
        torch.ops.deepspeed_ext.bias_dropout_residual(X, None, None, None, p=0.5)
