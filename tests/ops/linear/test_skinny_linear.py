"""skinny_linear: its numbers, in every size, layout and form, and its gradients."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import NAMES
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from skinny_linear_cases import EVERYTHING, arguments, assert_right
from torch import Tensor

from deepspeed_ext.ops import bias_activation, gated_activation, skinny_linear, skinny_linear_ref

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
def test_every_number_of_rows(dtype: torch.dtype, device: str) -> None:
    for rows in range(1, 65):
        assert_right(*arguments(rows, 37, 83, dtype, device))
        assert_right(*arguments(rows, 37, 96, dtype, device))


# Around every width of vectors, tiles, blocks and chunks, aligned and not.
SIZES = [(1, 1), (7, 3), (1, 7), (15, 8), (17, 16), (33, 15), (70, 33), (64, 64), (129, 520)]
SIZES += [(31, 1000), (300, 130), (5, 4095), (4, 4096), (67, 4104), (3, 9001), (2200, 40)]


@pytest.mark.parametrize(("n", "k"), SIZES)
@each_dtype
def test_sizes(dtype: torch.dtype, n: int, k: int, device: str) -> None:
    for rows in (1, 2, 5, 8, 9, 17, 64):
        assert_right(*arguments(rows, n, k, dtype, device))


@pytest.mark.parametrize("rows", [1, 11, 64])
@each_dtype
def test_forms(dtype: torch.dtype, rows: int, device: str) -> None:
    """Every option alone and with each other."""
    for bias, residual, activation in itertools.product(
        (False, True), (False, True), (None, *NAMES)
    ):
        for gated in (False, True) if activation else (False,):
            for n, k in ((39, 70), (40, 64)):
                form = dict(bias=bias, residual=residual, activation=activation, gated=gated)
                assert_right(*arguments(rows, n, k, dtype, device, **form))


@pytest.mark.parametrize(
    "shape", [(8,), (1, 8), (2, 3, 8), (0, 8), (2, 0, 8), (3, 0), (0,), (2, 1, 0)]
)
@pytest.mark.parametrize("n", [0, 1, 6])
def test_shapes(shape: tuple[int, ...], n: int, device: str) -> None:
    for form in ({}, dict(activation="silu", gated=True)):
        x, weight = (
            make(shape, F32, 0, device),
            make((2 * n if form else n, shape[-1]), F32, 1, device),
        )
        bias, residual = (make(s, F32, 2, device) for s in ((weight.shape[0],), (*shape[:-1], n)))
        assert_right(
            x, weight, dict(bias=bias, residual=residual, activation=None, gated=False) | form
        )
        assert_right(x, weight, dict(bias=None, activation=None, gated=False) | form)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """The results are those of contiguous copies, bit for bit."""
    x, residual = (LAYOUTS[layout](make((48, 200), dtype, i, device)) for i in (0, 3))
    if "columns" in layout:
        x, residual = x[:50], residual[:50]
    n = residual.shape[-1]
    # Its rows lie further apart than they are long.
    weight = make((n, x.shape[-1] + 9), dtype, 1, device)[:, : x.shape[-1]]
    bias = make((2 * weight.shape[0],), dtype, 2, device)[::2]
    dense = [tensor.contiguous() for tensor in (x, weight, bias, residual)]
    want = skinny_linear(*dense[:3], activation="gelu", residual=dense[3])
    got = skinny_linear(x, weight, bias, activation="gelu", residual=residual)
    assert torch.equal(got, want)
    assert_right(x, weight, dict(bias=bias, activation="gelu", gated=False, residual=residual))


@each_dtype
def test_unaligned(dtype: torch.dtype, device: str) -> None:
    """Every argument one element further on, with the same bits."""
    x, weight, options = arguments(23, 40, 328, dtype, device, **EVERYTHING)
    want = assert_right(x, weight, options)

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=dtype, device=device)
        return room[1:].view(tensor.shape).copy_(tensor)

    for change in (
        ("x",),
        ("weight",),
        ("bias",),
        ("residual",),
        ("x", "weight", "bias", "residual"),
    ):
        given = dict(x=x, weight=weight) | options
        given |= {name: moved(given[name]) for name in change}
        assert torch.equal(skinny_linear(**given), want)


@pytest.mark.parametrize("form", [{}, EVERYTHING], ids=["plain", "everything"])
@each_dtype
def test_what_is_not_finite_stays_in_its_row_and_column(
    dtype: torch.dtype, form: dict[str, Any], device: str
) -> None:
    for rows, n, k in ((1, 40, 96), (9, 33, 77), (12, 40, 4101), (64, 40, 4100)):
        x, weight, options = arguments(rows, n, k, dtype, device, **form)
        want = skinny_linear(x, weight, **options)
        bad_x, bad_weight = x.clone(), weight.clone()
        bad_weight[2, 0] = torch.nan  # behind the end of the row before
        if rows > 3:
            bad_x[-1, 0] = torch.nan
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            if rows > 3:
                bad_x[i, -1 - i] = value
            bad_weight[2 * i, k // 2] = value
        got = skinny_linear(bad_x, bad_weight, **options)
        good = slice(3, -1) if rows > 3 else slice(None)
        columns = [1, 3, *range(5, n)]
        assert torch.equal(got[good][:, columns], want[good][:, columns])
        assert got[:, 0].isnan().all() and got[:1, 5:].isnan().all() == (rows > 3)
        sums = skinny_linear(bad_x, bad_weight)
        expected = skinny_linear_ref(bad_x.cpu(), bad_weight.cpu()).to(sums)
        assert torch.equal(sums.isnan(), expected.isnan())
        assert torch.equal(sums[sums.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_beyond_the_dtype(dtype: torch.dtype, device: str) -> None:
    """Are inf of their sign; what is too small is not lost on the way."""
    x = torch.full((2, 64), 1e38, device=device).to(dtype)
    weight = (
        torch.tensor([[1.0], [-1.0], [1e-38]], device=device).to(dtype).expand(3, 64).contiguous()
    )
    got = skinny_linear(x, weight).float().cpu()
    assert torch.equal(got[:, :2], torch.tensor([[torch.inf, -torch.inf]] * 2))
    torch.testing.assert_close(got[:, 2], torch.full((2,), 64.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("rows", [65, 200])
@each_dtype
def test_with_more_rows_it_is_torchs(rows: int, dtype: torch.dtype, device: str) -> None:
    x, weight, options = arguments(rows, 24, 40, dtype, device, bias=True, residual=True)
    bias, residual = options["bias"], options["residual"]
    assert torch.equal(skinny_linear(x, weight, bias), F.linear(x, weight, bias))
    got = skinny_linear(x, weight, bias, activation="gelu", residual=residual)
    assert torch.equal(got, bias_activation(F.linear(x, weight), bias) + residual)
    got = skinny_linear(x, weight, bias, activation="silu", gated=True, residual=residual[:, :12])
    assert torch.equal(got, gated_activation(F.linear(x, weight, bias)) + residual[:, :12])
    with torch.autocast(device, dtype=BF16):
        assert skinny_linear(x, weight, bias).dtype == dtype
        assert skinny_linear(x[:3], weight, bias).dtype == dtype


FORMS: list[dict[str, Any]] = [
    {},
    dict(bias=True),
    dict(bias=True, residual=True, activation="gelu"),
]
FORMS += [dict(activation="silu", gated=True), EVERYTHING]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("rows", [1, 20, 80])
def test_gradients(rows: int, form: dict[str, Any], device: str) -> None:
    """Those of the reference; all of them, and each alone."""
    x, weight, options = arguments(rows, 24, 40, F32, device, **form)
    tensors = {"x": x, "weight": weight, "bias": options["bias"], "residual": options["residual"]}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    fixed = {name: options[name] for name in ("activation", "gated")}
    grad = make((rows, 24), F32, 9, device)

    def gradients(function: Any, names: list[str], change: Any) -> list[Tensor]:
        leaves = {
            name: change(tensor.detach()).requires_grad_(name in names)
            for name, tensor in given.items()
        }
        out = function(**leaves, **fixed)
        return list(torch.autograd.grad(out, [leaves[name] for name in names], change(grad)))

    names = list(given)
    want = gradients(skinny_linear_ref, names, lambda t: t.cpu().double())
    for got, expected in zip(gradients(skinny_linear, names, Tensor.clone), want, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-5, atol=2e-5)
    for name, expected in zip(names, want, strict=True):
        (got,) = gradients(skinny_linear, [name], Tensor.clone)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_reference_has_the_right_gradient(form: dict[str, Any]) -> None:
    x, weight, options = arguments(3, 4, 5, F32, **form)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    wide = {key: v.double() if isinstance(v, Tensor) else v for key, v in options.items()}
    assert torch.autograd.gradcheck(partial(skinny_linear_ref, **wide), leaves)
