"""rms_norm: the right numbers and gradients, for every dtype, length, layout and mixture."""

from typing import Any

import pytest
import torch
from rms_norm_cases import BF16, DTYPES, F16, F32, LENGTHS, LONG, gradients, make
from row_layouts import LAYOUTS
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import rms_norm, rms_norm_ref

ROUNDING = torch.finfo(F32).eps / 2
ROWS = 37


def assert_right(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None = None,
    **options: Any,
) -> None:
    """Compare results and gradients with the reference, element by element.

    A sum of n terms in float32 adds up what each of 32 running sums, or of the threads of a team,
    has: at most n / 32 + 8 roundings of the sum of the magnitudes; few other roundings follow.
    """
    shape = x.shape
    of = [x] if residual is None else [x, residual]
    grads = tuple(make(tuple(shape), t.dtype, 90 + i, str(x.device)) for i, t in enumerate(of))
    got = gradients(x, weight, residual, grads, lambda *a, **k: rms_norm(*a, **k, **options))
    wide = [None if t is None else t.cpu().double() for t in (x, weight, residual)]
    if residual is not None:  # the sum as it was rounded is what is normalized
        wide[2] = got[1].cpu().double() - wide[0]
    grads = tuple(g.cpu().double() for g in grads)
    want = gradients(*wide, grads, lambda *a, **k: rms_norm_ref(*a, **k, **options))

    n = max(1, shape[-1])
    sum_error = (n / 32 + 16) * ROUNDING
    total = wide[0] if residual is None else got[1].cpu().double()
    inverse = 1 / (total.square().mean(-1, keepdim=True) + options.get("eps", 1e-6)).sqrt()
    scale = 1 if weight is None else wide[1]
    errors = [sum_error * want[0].abs()]
    if residual is not None:
        errors.append(ROUNDING * total.abs())
    weighted = (grads[0] * scale * inverse).abs()
    along = (weighted * total.abs()).mean(-1, keepdim=True) * inverse**2 * total.abs()
    error_x = 4 * sum_error * (weighted + along)
    if residual is not None:
        error_x = error_x + ROUNDING * (grads[1].abs() + want[2].abs())
    errors.append(error_x)
    if weight is not None:
        terms = (grads[0] * total * inverse).abs().view(total.numel() // n, shape[-1]).sum(0)
        rows = total.numel() // n
        errors.append((sum_error + (min(rows, 256) + 80) * ROUNDING) * terms)
    if residual is not None:
        errors.append(error_x)
    names = ["out", "sum"][: len(grads)] + ["grad x", "grad weight"][: 1 + (weight is not None)]
    names += ["grad residual"] * (residual is not None)
    for name, value, expected, error in zip(names, got, want, errors, strict=True):
        mixed = name == "grad x" and residual is not None and residual.dtype != x.dtype
        if mixed:  # rounded to the residual's dtype first
            error = error + expected.abs() * torch.finfo(residual.dtype).eps
        assert value.shape == expected.shape
        assert_within(name, value.cpu(), expected, error.reshape(expected.shape))


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("n", LENGTHS + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, with_residual: bool, device: str) -> None:
    rows = 3 if n in LONG else ROWS
    x, residual = (make((rows, n), dtype, seed, device) for seed in range(2))
    assert_right(x, make((n,), dtype, 2, device), residual if with_residual else None)


@pytest.mark.parametrize(
    "shape", [(5,), (2, 3, 4, 8), (0, 8), (3, 0), (1, 1), (2, 0, 4), (1500, 40)]
)
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    for weight in (make(shape[-1:], F32, 2, device), None):
        for residual in (make(shape, F32, 1, device), None):
            assert_right(make(shape, F32, 0, device), weight, residual)


@pytest.mark.parametrize("n", [40, 41, 3000])
@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
def test_mixtures(
    x: torch.dtype, residual: torch.dtype | None, weight: torch.dtype, n: int, device: str
) -> None:
    added = None if residual is None else make((9, n), residual, 1, device)
    assert_right(make((9, n), x, 0, device), make((n,), weight, 2, device), added)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps(eps: float, device: str) -> None:
    assert_right(make((5, 64), F32, 0, device) * 1e-3, make((64,), F32, 1, device), eps=eps)


def test_rows_of_zeros(device: str) -> None:
    x = torch.zeros(2, 40, device=device)
    assert torch.equal(rms_norm(x), x)
    assert rms_norm(x, eps=0.0).isnan().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_only_the_row_of_what_is_not_finite(bad: float, device: str) -> None:
    x = make((4, 300), F32, 0, device)
    clean = rms_norm(x)
    x[2, 77] = bad
    got = rms_norm(x)
    assert got[2, 77].isnan()
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    made = [LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(4)]
    n = made[0].shape[-1]
    dense = [tensor.contiguous() for tensor in made]
    weight = make((2 * n,), dtype, 8, device)[::2]
    want = run(*dense, weight.contiguous())
    for i in range(4):
        mixed = [*dense[:i], made[i], *dense[i + 1 :]]
        for got, expected in zip(run(*mixed, weight), want, strict=True):
            assert torch.equal(got, expected)


def run(
    x: Tensor, residual: Tensor, grad: Tensor, grad_sum: Tensor, weight: Tensor
) -> list[Tensor]:
    """Without copies of the arguments, unlike `gradients`."""
    leaves = [t.detach().requires_grad_() for t in (x, residual, weight)]
    results = rms_norm(leaves[0], leaves[2], residual=leaves[1])
    return [*results, *torch.autograd.grad(results, leaves, (grad, grad_sum))]


def test_only_one_of_the_results_is_used(device: str) -> None:
    x, residual = (make((5, 64), F32, i, device).requires_grad_() for i in range(2))
    weight = make((64,), F32, 2, device).requires_grad_()
    out, total = rms_norm(x, weight, residual=residual)
    grad = make((5, 64), F32, 3, device)
    got = torch.autograd.grad(
        total, (x, residual, weight), grad, retain_graph=True, allow_unused=True
    )
    assert torch.equal(got[0], grad) and torch.equal(got[1], grad) and got[2] is None
    got = torch.autograd.grad(out, (x, residual, weight), grad)
    leaves = [t.detach().requires_grad_() for t in (total, weight)]
    want = torch.autograd.grad(rms_norm(*leaves), leaves, grad)
    for value, expected in zip(got, [want[0], want[0], want[1]], strict=True):
        assert torch.equal(value, expected)


def test_only_what_is_asked_for(device: str) -> None:
    x, weight = make((5, 64), F32, 0, device), make((64,), F32, 1, device)
    out = rms_norm(x, weight.requires_grad_())
    out.sum().backward()
    assert weight.grad is not None
    out = rms_norm(x.requires_grad_(), weight.detach())
    out.sum().backward()
    assert x.grad is not None and not rms_norm(x.detach(), weight.detach()).requires_grad


def test_reference_has_the_right_gradient() -> None:
    """By finite differences, so that comparing gradients with the reference's means something."""
    x, residual = (make((3, 6), F32, i).double().requires_grad_() for i in range(2))
    weight = make((6,), F32, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b, c: rms_norm_ref(a, b, residual=c), (x, weight, residual)
    )
    assert torch.autograd.gradcheck(lambda a: rms_norm_ref(a), (x,))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_as_torch_does(dtype: torch.dtype, device: str) -> None:
    x, weight = make((50, 700), dtype, 0, device), make((700,), dtype, 1, device)
    want = torch.nn.functional.rms_norm(x.double(), (700,), weight.double(), 1e-6)
    torch.testing.assert_close(rms_norm(x, weight), want.to(dtype))
