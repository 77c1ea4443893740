"""softmax: what has the same bits, and what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import BF16, F32, make
from softmax_cases import of_both
from torch import Tensor

from deepspeed_ext.ops import softmax, softmax_ref


def test_ways_to_say_the_same_have_the_same_bits(device: str) -> None:
    """Causality and a window are masks that nobody has to make."""
    x, grad = (make((2, 3, 90, 300), BF16, seed, device) for seed in range(2))
    ahead = torch.arange(300, device=device) - torch.arange(90, device=device)[:, None] - 210
    for options, mask in (
        (dict(causal=True), ahead <= 0),
        (dict(window=(50, 4)), (ahead >= -50) & (ahead <= 4)),
    ):
        added = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
        want = of_both(x, grad, mask=mask)
        for same in (options, dict(mask=added), options | dict(mask=mask)):
            for got, expected in zip(of_both(x, grad, **same), want, strict=True):
                assert torch.equal(got, expected)


def test_columns_that_are_left_out_change_nothing_on_the_cpu() -> None:
    x = make((7, 300), F32, 0)
    mask = torch.arange(300) < 77
    assert torch.equal(softmax(x, mask)[:, :77], softmax(x[:, :77]))


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


BROADCAST = "expected one that can be broadcast to"
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "x has shape [], expected a dimension at least": lambda: dict(x=torch.ones(())),
    "x is float64, expected float32, bfloat16 or float16":
        lambda: dict(x=torch.ones(2, 4).double()),
    "x has no memory, expected 24 elements": lambda: dict(x=freed(torch.ones(2, 3, 4))),
    "x is torch.sparse_coo, expected torch.strided": lambda: dict(x=torch.ones(2, 4).to_sparse()),
    f"mask has shape [3], {BROADCAST} [2, 3, 4]": lambda: dict(mask=torch.ones(3)),
    f"mask has shape [2, 1], {BROADCAST} [2, 3, 4]": lambda: dict(mask=torch.ones(2, 1)),
    f"mask has shape [1, 2, 3, 4], {BROADCAST} [2, 3, 4]":
        lambda: dict(mask=torch.ones(1, 2, 3, 4)),
    "mask is int64, expected bool, uint8, float32, bfloat16 or float16":
        lambda: dict(mask=torch.ones(4).long()),
    "mask is on meta, expected cpu": lambda: dict(mask=torch.ones(4, device="meta")),
    "mask has no memory, expected 4 elements": lambda: dict(mask=freed(torch.ones(4))),
    "mask has over 6 dimensions that do not join, expected so many or fewer":
        lambda: dict(x=torch.ones(*[2] * 9), mask=torch.ones(2, 1, 2, 1, 2, 1, 2, 1, 2)),
    f"alibi_slopes has shape [3], {BROADCAST} [2]": lambda: dict(alibi_slopes=torch.ones(3)),
    "alibi_slopes is bfloat16, expected float32":
        lambda: dict(alibi_slopes=torch.ones(2).bfloat16()),
    "x has shape [4], expected two dimensions at least, as alibi_slopes needs queries and keys":
        lambda: dict(x=torch.ones(4), alibi_slopes=torch.ones(())),
    "scale is inf, expected a finite float32": lambda: dict(scale=float("inf")),
    "scale is 1e+60, expected a finite float32": lambda: dict(scale=1e60),
    "softcap is -1, expected 0, or a number over 1e-30": lambda: dict(softcap=-1.0),
    "softcap is nan, expected a finite float32":
        lambda: dict(softcap=float("nan")),
    "softcap is 1e-40, expected 0, or a number over 1e-30": lambda: dict(softcap=1e-40),
    "window is (-2, 0), expected counts of keys, or -1 for all": lambda: dict(window=(-2, 0)),
    "offset is 18014398509481984, expected one within 2^53": lambda: dict(offset=2**54),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    softmax(torch.ones(2, 4))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=rf"^softmax: {re.escape(text)}$"):
        softmax(**(dict(x=torch.ones(2, 3, 4)) | REFUSED[text]()))


@pytest.mark.parametrize("window", [5, (5,), (1, 2, 3), None, "55"])
def test_a_window_is_a_pair(window: Any) -> None:
    for function in (softmax, softmax_ref):
        with pytest.raises(ValueError, match=rf"^softmax: window is {re.escape(repr(window))}, ex"):
            function(torch.ones(2, 4), window=window)
    assert torch.equal(softmax(torch.ones(2, 4), window=[0, 0]), torch.eye(4)[2:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(window=(1.5, 2)), "window[0] is 1.5, expected a whole number"),
        (dict(window=(1, "2")), "window[1] is '2', expected a whole number"),
        (dict(offset=1.0), "offset is 1.0, expected a whole number"),
    ],
)
def test_places_are_whole_numbers(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=rf"^softmax: {re.escape(text)}$"):
        softmax(torch.ones(2, 4), **options)


def test_slopes_have_no_gradient() -> None:
    x, alibi_slopes = torch.ones(2, 3, 4), torch.ones(2).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^softmax: alibi_slopes requires a gradient, "):
        softmax(x, alibi_slopes=alibi_slopes)
    with torch.no_grad():
        softmax(x, alibi_slopes=alibi_slopes)


def test_backward_wants_x_where_there_is_a_cap() -> None:
    tensor = torch.ones(2, 4)
    softmax(tensor.clone().requires_grad_()).sum().backward()
    options = dict(scale=1.0, before=-1, after=-1, offset=None)
    for x, softcap, text in (
        (None, 2.0, "x is None, expected a tensor, as softcap is 2"),
        (tensor, 0.0, "x is a tensor, expected None, as softcap is 0"),
    ):
        with pytest.raises(ValueError, match=f"^softmax_backward: {re.escape(text)}$"):
            torch.ops.deepspeed_ext.softmax_backward(tensor, tensor, x, softcap=softcap, **options)


def test_refuses_tensors_of_two_devices(cuda: str) -> None:
    for name, other in (("mask", torch.ones(4)), ("alibi_slopes", torch.ones(2))):
        with pytest.raises(ValueError, match=f"^softmax: {name} is on cpu, expected cuda:0$"):
            softmax(torch.ones(2, 3, 4, device=cuda), **{name: other})
