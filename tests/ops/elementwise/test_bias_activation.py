"""bias_activation: numbers and gradients, and what it refuses."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from activation_cases import NAMES, ROUNDING, errors_of
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F16, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import bias_activation, bias_activation_ref


def run(function: Callable[..., Tensor], grad: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return the result and the gradients, without copies of the arguments."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def assert_right(x: Tensor, bias: Tensor | None, grad: Tensor, activation: str = "gelu") -> None:
    """Compare with the reference; x + bias is rounded once, which its slope multiplies.

    The gradient of the bias adds up groups of 256 rows, each row by row, then the groups.
    """
    arguments = [x] if bias is None else [x, bias]
    wide = [tensor.cpu().double() for tensor in arguments]
    wide_grad = grad.cpu().double()
    want = run(partial(bias_activation_ref, activation=activation), wide_grad, *wide)
    total = sum(wide)
    value, slope = errors_of(activation, total)
    if activation == "gelu" and x.dtype != F32:  # which CUDA knows
        value = value + (2.0**-11.7 if x.dtype == BF16 else 2.0**-19.2) * want[0].abs()
    rounding = 0 if bias is None else ROUNDING * total.abs()
    # Slopes are at most 1.13 in magnitude, and change by 0.8 x per 1 at most, of quick gelu by 0.9.
    of_x = wide_grad.abs() * (slope + rounding)
    errors = [value + 1.2 * rounding, of_x]
    if bias is not None:
        rows = total.numel() // max(1, total.shape[-1])
        grads = want[1].abs().view(rows, total.shape[-1])
        sums = (min(rows, 256) + rows // 256 + 40) * ROUNDING * grads.sum(0)
        errors.append(of_x.view(rows, total.shape[-1]).sum(0) + sums)
    got = run(partial(bias_activation, activation=activation), grad, *arguments)
    for name, result, expected, error in zip(["out", "x", "bias"], got, want, errors, strict=False):
        assert result.shape == expected.shape
        assert_within(name, result.cpu(), expected, 2 * error + 2.0**-120)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 1000, 4104])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_values(activation: str, dtype: torch.dtype, n: int, device: str) -> None:
    x, grad = (make((19, n), dtype, seed, device) for seed in range(2))
    assert_right(x * 4, make((n,), dtype, 2, device), grad, activation)
    assert_right(x * 4, None, grad, activation)


@pytest.mark.parametrize(
    "shape", [(5,), (2, 3, 4, 8), (0, 8), (3, 0), (1, 1), (2, 0, 4), (259, 40), (700, 9)]
)
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    x, grad = (make(shape, F32, seed, device) for seed in range(2))
    for bias in (make(shape[-1:], F32, 2, device), None):
        assert_right(x, bias, grad)


@pytest.mark.parametrize(("rows", "n"), [(2100, 40), (600, 4300), (33, 9000)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_many_rows_and_columns(dtype: torch.dtype, rows: int, n: int, device: str) -> None:
    """Several groups of rows, several tiles of columns, more than one thread."""
    x, grad = (make((rows, n), dtype, seed, device) for seed in range(2))
    assert_right(x, make((n,), dtype, 2, device), grad)


@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("bias", DTYPES, ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
def test_mixtures(x: torch.dtype, bias: torch.dtype, n: int, device: str) -> None:
    grad = make((9, n), x, 1, device)
    assert_right(make((9, n), x, 0, device), make((n,), bias, 2, device), grad)


@pytest.mark.parametrize("activation", NAMES)
def test_extremes(activation: str, device: str) -> None:
    x = [0.0, -0.0, 5, -5, 9, -9, 13, -13, 14.4, -14.4, 50, -50, 88, -88, -104, 3e38, -3e38]
    tensor = torch.tensor(x, device=device)
    assert_right(tensor, None, torch.ones_like(tensor), activation)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], device=device)
    got = bias_activation(special, activation=activation)
    assert got[0].item() == float("inf") and got[2].isnan() and got[3].isfinite()
    assert got[1].item() == 0 if activation == "relu" else got[1].isnan()


def test_the_tail_of_gelu_keeps_its_digits(device: str) -> None:
    """Where 1 + erf has none left."""
    x = torch.linspace(-13, -3, 1001, device=device)
    want = bias_activation_ref(x.cpu())
    off = (bias_activation(x).cpu().double() / want - 1).abs()
    assert off.max() < 2e-5


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gelu_of_every_number_of_16_bits(dtype: torch.dtype, device: str) -> None:
    """Off by 0.64 or 0.51 units in the last place at most, of which rounding takes 0.5."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    wide = x.double()
    want = wide * torch.special.erfc(-wide / 2**0.5) / 2
    stored = torch.finfo(dtype)
    power = want.abs().clamp(min=stored.smallest_normal).log2().floor()
    got = bias_activation(x.to(device)).cpu().double()
    # Of what is below 2^-126 CUDA makes 0, which is multiplied by up to 14.
    units = 0.64 if dtype == BF16 else 0.51
    assert ((got - want).abs() <= units * stored.eps * 2**power + 2.0**-122).all()


def test_relu_is_torchs(device: str) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 1e-40, 2.0, float("nan")], device=device)
    grad = torch.tensor([float("inf"), 1, 1, 1, 1, 1], device=device)
    want = run(torch.relu, grad, x)
    for got, expected in zip(
        run(partial(bias_activation, activation="relu"), grad, x), want, strict=True
    ):
        assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    made = [LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(2)]
    dense = [tensor.contiguous() for tensor in made]
    bias = make((2 * made[0].shape[-1],), dtype, 8, device)[::2]
    want = run(bias_activation, dense[1], dense[0], bias.contiguous())
    for x, grad in ((made[0], dense[1]), (dense[0], made[1]), made):
        for got, expected in zip(run(bias_activation, grad, x, bias), want, strict=True):
            assert torch.equal(got, expected)


def test_unaligned(device: str) -> None:
    """Every argument one element further on."""
    made = [make((rows * 64 + 1,), BF16, i, device)[1:] for i, rows in enumerate((37, 37, 1))]
    x, grad, bias = made[0].view(37, 64), made[1].view(37, 64), made[2]
    want = run(bias_activation, grad.clone(), x.clone(), bias.clone())
    for got, expected in zip(run(bias_activation, grad, x, bias), want, strict=True):
        assert torch.equal(got, expected)


def test_only_what_is_asked_for(device: str) -> None:
    x, bias = make((5, 64), F32, 0, device), make((64,), F32, 1, device)
    both = run(bias_activation, torch.ones_like(x), x, bias)
    of_x = run(lambda a: bias_activation(a, bias), torch.ones_like(x), x)
    of_bias = run(lambda b: bias_activation(x, b), torch.ones_like(x), bias)
    assert torch.equal(of_x[1], both[1]) and torch.equal(of_bias[1], both[2])


REFUSED: dict[str, tuple[Tensor, ...]] = {
    "x has shape [], expected a dimension at least": (torch.ones(()),),
    "x is int64, expected float32, bfloat16 or float16": (torch.ones(2, 4).long(),),
    "bias has shape [3], expected [4]": (torch.ones(2, 4), torch.ones(3)),
    "bias has shape [1, 4], expected [4]": (torch.ones(2, 4), torch.ones(1, 4)),
    "bias is float64, expected float32, bfloat16 or float16": (
        torch.ones(2, 4),
        torch.ones(4).double(),
    ),
    "bias is on meta, expected cpu": (torch.ones(2, 4), torch.ones(4, device="meta")),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    bias_activation(torch.ones(4))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=f"^bias_activation: {re.escape(text)}$"):
        bias_activation(*REFUSED[text])


def test_refuses_an_activation_that_it_does_not_know() -> None:
    text = "activation is 'swish', expected one of gelu, gelu_tanh, gelu_quick, relu, silu"
    with pytest.raises(ValueError, match=f"^bias_activation: {re.escape(text)}$"):
        bias_activation(torch.ones(4), activation="swish")


def test_refuses_another_gradient() -> None:
    x = torch.ones(2, 4)
    op = torch.ops.deepspeed_ext.bias_activation_backward
    text = "grad_out has shape [4], expected [2, 4]"
    with pytest.raises(ValueError, match=f"^bias_activation_backward: {re.escape(text)}$"):
        op(torch.ones(4), x, None, activation=0, needs_grad_bias=False)


@pytest.mark.parametrize("activation", NAMES)
def test_reference_has_the_right_gradient(activation: str) -> None:
    x, bias = make((3, 6), F32, 0).double(), make((6,), F32, 1).double()
    reference = partial(bias_activation_ref, activation=activation)
    assert torch.autograd.gradcheck(reference, (x.requires_grad_(), bias.requires_grad_()))


@pytest.mark.parametrize("activation", NAMES)
def test_as_torch_does(activation: str, device: str) -> None:
    theirs = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[activation]
    x, bias = make((50, 700), F32, 0, device), make((700,), F32, 1, device)
    want = theirs(x.double() + bias.double())
    torch.testing.assert_close(bias_activation(x, bias, activation=activation), want.to(F32))
    assert torch.allclose(bias_activation_ref(x, bias, activation=activation), want, atol=1e-13)
