"""Linear layers that do the RMS norms around them between them: their numbers and their bits."""

import hashlib
from functools import partial
from typing import Any

import pytest
import torch
from activation_cases import ROUNDING
from norms_around_cases import (
    BF16,
    EVERYTHING,
    F32,
    LAYERS,
    Layer,
    layer_of,
    norm_of,
    options_of,
    undivided,
)
from samples import make
from torch import Tensor

from deepspeed_ext.ops import NextNorm, Undivided, rms_norm, rms_norm_ref, skinny_linear

each_layer = pytest.mark.parametrize("name", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
ADDED = dict(bias=True, residual=True, activation="gelu")
AFTER = pytest.mark.parametrize("form", [{}, ADDED], ids=["plain", "everything"])
BEFORE = pytest.mark.parametrize("form", [{}, EVERYTHING], ids=["plain", "everything"])

# Rows, columns and length: around every width of vectors, tiles, blocks, chunks and clusters.
SIZES = [(1, 8, 8), (2, 24, 40), (5, 40, 104), (9, 72, 136), (17, 136, 264), (64, 40, 96)]
SIZES += [(1, 16, 5000), (3, 304, 4104), (8, 2200, 40), (33, 8, 9000), (64, 520, 1032)]


def bits(*tensors: Tensor) -> str:
    """Return a digest of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = []
    for number, name in enumerate(LAYERS):
        for rows, n, k in ((1, 136, 5000), (3, 64, 40), (13, 200, 104), (64, 40, 136)):
            dtype = (F32, BF16)[number % 2]
            layer, x = layer_of(name, n, k, dtype, device), undivided(rows, k, dtype, device)
            out, normed = layer.norm(x, norm=norm_of(n, dtype, device))
            found.append(bits(out, normed.x, normed.squares, layer(x)))
    return " ".join(found)


@AFTER
@each_dtype
@each_layer
def test_a_norm_after(name: str, dtype: torch.dtype, form: dict[str, Any], device: str) -> None:
    """The results are those without it; what is left of it is that of results as they are rounded.

    The weight with its offset, the product and its storage are rounded once each; a square and its
    three sums likewise.
    """
    for rows, n, k in SIZES:
        layer, norm = layer_of(name, n, k, dtype, device), norm_of(n, dtype, device)
        x, options = make((rows, k), dtype, 0, device), options_of(rows, n, dtype, device, **form)
        del options["gated"]
        out, normed = layer.norm(x, norm=norm, **options)
        assert torch.equal(out, layer(x, **options))
        assert normed.x.dtype == dtype and normed.squares.dtype == F32 and normed.eps == norm.eps
        assert normed.x.shape == (rows, n) and normed.squares.shape == (rows, n // 8)
        far = out.cpu().double()
        want = far * (norm.weight.cpu().double() + norm.weight_offset)
        error = (torch.finfo(dtype).eps / 2 + 2 * ROUNDING) * want.abs()
        assert bool(((normed.x.cpu().double() - want).abs() <= 1.001 * error).all())
        squares = far.square().unflatten(-1, (-1, 8)).sum(-1)
        assert bool(
            ((normed.squares.cpu().double() - squares).abs() <= 4 * ROUNDING * squares).all()
        )


@each_layer
def test_the_reference_of_a_norm_after(name: str) -> None:
    layer, norm, x = layer_of(name, 16, 40, F32), norm_of(16, F32), make((3, 40), F32, 0)
    out, normed = layer.norm(x, norm=norm)
    far, want = layer.norm_ref(x, norm=norm)
    for got, expected in ((out, far), (normed.x, want.x), (normed.squares, want.squares)):
        assert expected.dtype == torch.float64
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0.05)
    assert want.eps == norm.eps
    exact = rms_norm_ref(far, norm.weight, eps=norm.eps, weight_offset=norm.weight_offset)
    second = layer_of("floats", 8, 16, F32)
    torch.testing.assert_close(second.ref(want), second.ref(exact))


@BEFORE
@each_dtype
@each_layer
def test_a_norm_before(name: str, dtype: torch.dtype, form: dict[str, Any], device: str) -> None:
    for rows, n, k in SIZES:
        options = options_of(rows, n, dtype, device, **form)
        layer = layer_of(name, 2 * n if options["gated"] else n, k, dtype, device)
        layer.assert_right(undivided(rows, k, dtype, device), options)


@each_dtype
@each_layer
def test_norms_before_and_after(name: str, dtype: torch.dtype, device: str) -> None:
    layer, norm = layer_of(name, 48, 104, dtype, device), norm_of(48, dtype, device)
    x = undivided(7, 104, dtype, device)
    out, normed = layer.norm(x, norm=norm, activation="silu")
    assert torch.equal(out, layer(x, activation="silu"))
    want = torch.eye(48, device=device, dtype=dtype)
    assert torch.equal(normed.x, Undivided(*_of_results(out, norm)).x)
    assert torch.equal(normed.squares, Undivided(*_of_results(out, norm)).squares)
    assert skinny_linear(normed, want).shape == (7, 48)


def _of_results(out: Tensor, norm: NextNorm) -> tuple[Tensor, Tensor, float]:
    """Return what is left of a norm after these results, in the same order."""
    wide = out.float()
    scaled = (wide * (norm.weight.float() + norm.weight_offset)).to(out.dtype)
    sums = wide.square().unflatten(-1, (-1, 8))
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return scaled, sums[..., 0], norm.eps


@each_dtype
def test_both_together_are_the_norm(dtype: torch.dtype, device: str) -> None:
    """No further from the norm in float64 than rounding its result would be, and a little more."""
    first, norm = layer_of("floats", 512, 300, dtype, device), norm_of(512, dtype, device)
    second = layer_of("floats", 200, 512, dtype, device, seed=2)
    x, residual = make((33, 300), dtype, 0, device), make((33, 512), dtype, 3, device)
    out, normed = first.norm(x, norm=norm, residual=residual)
    exact = rms_norm_ref(out.cpu(), norm.weight.cpu(), eps=norm.eps, weight_offset=1.0)
    assert isinstance(exact, Tensor)
    got, want = second(normed).cpu().double(), second.ref(exact)
    terms = exact.abs() @ second.weight.cpu().double().abs().t()
    unit = torch.finfo(dtype).eps / 2
    error = (unit + 80 * ROUNDING) * terms + unit * want.abs()
    assert bool(((got - want).abs() <= 1.01 * error).all())
    usual = rms_norm(out, norm.weight, eps=norm.eps, weight_offset=1.0)
    other = (second(usual).cpu().double() - want).square().mean().sqrt()
    assert (got - want).square().mean().sqrt() <= 1.1 * other


def _all_results(
    layer: Layer, norm: NextNorm, bias: Tensor, x: Undivided, residual: Tensor
) -> list[Tensor]:
    """Return those of a call with all that there is, and of one with gates."""
    out, normed = layer.norm(x, norm=norm, bias=bias, residual=residual, activation="gelu")
    return [out, normed.x, normed.squares, layer(x, activation="silu", gated=True)]


@pytest.mark.parametrize(("n", "k"), [(40, 96), (520, 136), (40, 5000), (2200, 40), (136, 4104)])
@each_layer
def test_a_row_is_the_same_in_any_batch(name: str, n: int, k: int, device: str) -> None:
    """Alone, at any place, at another address, among any number of rows that are not finite."""
    for dtype in (F32, BF16):
        layer, norm = layer_of(name, n, k, dtype, device), norm_of(n, dtype, device)
        x, bias = undivided(64, k, dtype, device), make((n,), dtype, 2, device)
        residual = make((64, n), dtype, 3, device)
        run = partial(_all_results, layer, norm, bias)
        want = run(x, residual)
        for row in (0, 1, 7, 8, 31, 63):
            one = slice(row, row + 1)
            alone = run(Undivided(x.x[one], x.squares[one], x.eps), residual[one])
            for got, expected in zip(alone, want, strict=True):
                assert torch.equal(got[0], expected[row])
        for rows in (2, 3, 5, 9, 16, 33, 63):
            place = rows * 2 // 3
            near = x.x.new_full((rows * k + 1,), torch.nan)[1:].view(rows, k)
            squares = x.squares.new_full((rows * k // 8 + 1,), torch.nan)[1:].view(rows, k // 8)
            near[place], squares[place] = x.x[5], x.squares[5]
            found = run(Undivided(near, squares, x.eps), residual[5].expand(rows, n))
            for got, expected in zip(found, want, strict=True):
                assert torch.equal(got[place], expected[5])


@each_dtype
@each_layer
def test_what_is_not_finite_stays_in_its_row(name: str, dtype: torch.dtype, device: str) -> None:
    """And what has squares that are too large is NaN, not 0."""
    first, norm = layer_of(name, 64, 96, dtype, device), norm_of(64, dtype, device)
    second = layer_of(name, 40, 64, dtype, device)
    x, residual = make((7, 96), dtype, 0, device), make((7, 64), dtype, 3, device)
    want = second(first.norm(x, norm=norm, residual=residual)[1])
    bad = residual.clone()
    bad[0, 5], bad[2, 7], bad[4, 63], bad[6] = torch.nan, torch.inf, -torch.inf, 1e30
    out, normed = first.norm(x, norm=norm, residual=bad)
    got = second(normed)
    assert torch.equal(got[1::2], want[1::2]) and want.isfinite().all()
    assert got[::2].isnan().all() and out[6].isfinite().all()


@each_dtype
@each_layer
def test_rows_of_zeros_and_tiny_rows(name: str, dtype: torch.dtype, device: str) -> None:
    """They are what the norm makes of them."""
    first, second = (
        layer_of(name, 64, 96, dtype, device),
        layer_of(name, 40, 64, dtype, device),
    )
    x, residual = torch.zeros(4, 96, dtype=dtype, device=device), make((4, 64), F32, 3, device)
    residual[0], residual[1], residual[2] = 0, residual[1] * 1e-30, residual[2] * 1e-10
    residual = residual.to(dtype)
    for eps in (1e-5, 0.0):
        norm = NextNorm(torch.ones(64, dtype=dtype, device=device), eps)
        out, normed = first.norm(x, norm=norm, residual=residual)
        got = second(normed)
        usual = rms_norm(out, norm.weight, eps=eps)
        want = second(usual)
        rows = slice(0, 4) if eps > 0 else slice(2, 4)
        assert torch.equal(got[0].isnan(), want[0].isnan()) and want[0].isnan().all() == (eps == 0)
        # int8 rounds each row to 127 steps, of which those of the two may be neighbours.
        rough = 0.05 if "by integers" in name else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[rows], want[rows], rtol=rough, atol=rough)


@pytest.mark.parametrize("change", ["unaligned", "strided", "last of several", "one for all"])
@each_layer
def test_layouts(name: str, change: str, device: str) -> None:
    """The results are those of contiguous copies, bit for bit."""
    layer, x = layer_of(name, 40, 136, BF16, device), undivided(12, 136, BF16, device)
    if change == "unaligned":
        squares = torch.empty(12 * 17 + 1, device=device)[1:].view(12, 17).copy_(x.squares)
        given = x._replace(squares=squares)
    elif change == "strided":
        given = x._replace(
            x=torch.cat([x.x, x.x], -1)[:, :136], squares=torch.cat([x.squares] * 2, -1)[:, :17]
        )
    elif change == "last of several":
        given = Undivided(x.x.view(4, 3, 136)[:, -1], x.squares.view(4, 3, 17)[:, -1], x.eps)
    else:
        given = Undivided(x.x[:1].expand(12, 136), x.squares[:1].expand(12, 17), x.eps)
    dense = Undivided(given.x.contiguous(), given.squares.contiguous(), x.eps)
    assert torch.equal(layer(given), layer(dense))


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
@each_layer
def test_shapes(name: str, shape: tuple[int, ...], device: str) -> None:
    layer, norm = layer_of(name, 8, 8, F32, device), norm_of(8, F32, device)
    x = make(shape, F32, 0, device)
    out, normed = layer.norm(x, norm=norm)
    assert out.shape == normed.x.shape == (*shape[:-1], 8)
    assert normed.squares.shape == (*shape[:-1], 1)
    flat = layer.norm(x.reshape(-1, 8), norm=norm)[1]
    assert torch.equal(flat.x.view(normed.x.shape), normed.x)
    again = layer_of(name, 12, 8, F32, device)
    assert again(normed).shape == (*shape[:-1], 12)
    assert torch.equal(again(flat).view(*shape[:-1], 12), again(normed))
