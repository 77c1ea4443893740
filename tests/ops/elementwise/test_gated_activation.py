"""gated_activation: numbers and gradients, and what it refuses."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from activation_cases import NAMES, errors_of
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import gated_activation, gated_activation_ref, swiglu, swiglu_ref


def run(function: Callable[..., Tensor], grad: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return the result and the gradients, without copies of the arguments."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def assert_right(gate: Tensor, up: Tensor, grad: Tensor, activation: str = "silu") -> None:
    """Compare all forms with the reference."""
    wide = [tensor.cpu().double() for tensor in (grad, gate, up)]
    want = run(partial(gated_activation_ref, activation=activation), *wide)
    value, slope = errors_of(activation, wide[1])
    by_up, by_grad = wide[2].abs(), wide[0].abs()
    errors = [value * by_up, slope * by_up * by_grad, value * by_grad]
    function = partial(gated_activation, activation=activation)
    got = run(function, grad, gate, up)
    for name, result, expected, error in zip(["out", "gate", "up"], got, want, errors, strict=True):
        assert result.shape == expected.shape
        assert_within(name, result.cpu(), expected, 2 * error + 2.0**-120)
    if gate.dtype == up.dtype and gate.dim() > 0:
        for both, gate_last in (([gate, up], False), ([up, gate], True)):
            packed = partial(function, gate_last=gate_last)
            out, grad_both = run(packed, grad, torch.cat(both, -1))
            assert torch.equal(out, got[0])
            assert torch.equal(grad_both, torch.cat(got[2:0:-1] if gate_last else got[1:], -1))


@pytest.mark.parametrize("n", [1, 7, 8, 16, 33, 1000, 4104])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_values(activation: str, dtype: torch.dtype, n: int, device: str) -> None:
    gate, up, grad = (make((19, n), dtype, seed, device) for seed in range(3))
    assert_right(gate * 4, up, grad, activation)


def test_swiglu_is_one_of_them(device: str) -> None:
    gate, up = (make((5, 40), F32, seed, device) for seed in range(2))
    assert torch.equal(swiglu(gate, up), gated_activation(gate, up))
    assert torch.equal(swiglu(gate), gated_activation(gate))
    assert torch.equal(swiglu_ref(gate, up), gated_activation_ref(gate, up))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 8), (0, 8), (3, 0), (1, 1), (2, 0, 4)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    assert_right(*(make(shape, F32, seed, device) for seed in range(3)))


def test_many_elements(device: str) -> None:
    assert_right(*(make((70, 5000), BF16, seed, device) for seed in range(3)))


@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("up", DTYPES, ids=str)
@pytest.mark.parametrize("gate", DTYPES, ids=str)
def test_mixtures(gate: torch.dtype, up: torch.dtype, n: int, device: str) -> None:
    tensors = (make((9, n), dtype, i, device) for i, dtype in enumerate((gate, up, gate)))
    assert_right(*tensors)


@pytest.mark.parametrize("activation", NAMES)
def test_extremes(activation: str, device: str) -> None:
    gate = torch.tensor([0.0, -0.0, 50, -50, 88, -88, -90, -104, 3e38, -3e38], device=device)
    assert_right(gate, torch.full_like(gate, 0.5), torch.ones_like(gate), activation)
    inf = torch.tensor([float("inf")], device=device)
    one = torch.ones(1, device=device)
    assert gated_activation(inf, one, activation=activation).item() == float("inf")
    low = gated_activation(-inf, one, activation=activation)
    assert low.item() == 0 if activation == "relu" else low.isnan().item()
    bad = torch.tensor([float("nan"), 1.0], device=device)
    one = torch.ones(2, device=device)
    for arguments in ((bad, one), (one, bad)):
        out = gated_activation(*arguments, activation=activation)
        assert [value.isnan().item() for value in out] == [True, False]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    made = [LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(3)]
    dense = [tensor.contiguous() for tensor in made]
    want = run(swiglu, *dense)
    for i in range(3):
        mixed = [*dense[:i], made[i], *dense[i + 1 :]]
        for got, expected in zip(run(swiglu, *mixed), want, strict=True):
            assert torch.equal(got, expected)
    if made[0].shape[-1] % 2 == 0:
        grad = made[1][..., : made[1].shape[-1] // 2]
        for got, expected in zip(
            run(swiglu, grad, made[0]), run(swiglu, grad.contiguous(), dense[0]), strict=True
        ):
            assert torch.equal(got, expected)


REFUSED: dict[str, tuple[Tensor, ...]] = {
    "gate has shape [], expected a dimension at least": (torch.ones(()), torch.ones(())),
    "up has shape [4], expected [2, 4]": (torch.ones(2, 4), torch.ones(4)),
    "up is float64, expected float32, bfloat16 or float16": (
        torch.ones(2, 4),
        torch.ones(2, 4).double(),
    ),
    "gate_up has shape [2, 5], expected a last dimension of even length": (torch.ones(2, 5),),
    "up is on meta, expected cpu": (torch.ones(2, 4), torch.ones(2, 4, device="meta")),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    swiglu(torch.ones(4), torch.ones(4))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=f"^gated_activation: {re.escape(text)}$"):
        swiglu(*REFUSED[text])


def test_refuses_options() -> None:
    one = torch.ones(2, 4)
    names = "gelu, gelu_tanh, gelu_quick, relu, silu"
    text = f"activation is 'GELU', expected one of {names}"
    with pytest.raises(ValueError, match=f"^gated_activation: {re.escape(text)}$"):
        gated_activation(one, activation="GELU")
    text = "gate_last is True, expected False, as up is a tensor of its own"
    with pytest.raises(ValueError, match=f"^gated_activation: {text}$"):
        gated_activation(one, one, gate_last=True)
    op = torch.ops.deepspeed_ext.gated_activation
    for number in (-1, 5):
        text = f"activation is {number}, expected a number from 0 to 4"
        with pytest.raises(ValueError, match=f"^gated_activation: {text}$"):
            op(one, one, activation=number)


@pytest.mark.parametrize("activation", NAMES)
def test_reference_has_the_right_gradient(activation: str) -> None:
    gate, up = (make((3, 6), F32, i).double().requires_grad_() for i in range(2))
    reference = partial(gated_activation_ref, activation=activation)
    assert torch.autograd.gradcheck(reference, (gate, up))
    assert torch.autograd.gradcheck(partial(reference, gate_last=True), (gate,))
