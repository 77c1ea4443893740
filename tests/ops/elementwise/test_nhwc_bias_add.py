"""nhwc_bias_add: numbers and gradients, and what it refuses."""

import re

import pytest
import torch
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import nhwc_bias_add, nhwc_bias_add_ref

FORMS = {"bias": 2, "other": 3, "other bias": 4}


def arguments(shape: tuple[int, ...], dtypes: list[torch.dtype], device: str) -> list[Tensor]:
    shapes = [shape, shape[-1:], shape, shape[-1:]]
    pairs = zip(shapes, dtypes, strict=False)
    return [make(size, dtype, seed, device) for seed, (size, dtype) in enumerate(pairs)]


def assert_right(tensors: list[Tensor]) -> None:
    """Compare with the reference. Each addition rounds to float32; sums over rows do so in a chain
    of 256 rows at most, then over the groups of rows."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    got, want = nhwc_bias_add(*leaves), nhwc_bias_add_ref(*wide)
    assert got.dtype == tensors[0].dtype and got.is_contiguous()
    sizes = sum(tensor.abs() for tensor in wide)
    assert_within("out", got.detach().cpu(), want.detach(), 4 * 2.0**-24 * sizes.detach())
    grad = make(tuple(got.shape), got.dtype, 9, got.device.type)
    found = torch.autograd.grad(got, leaves, grad)
    expected = torch.autograd.grad(want, wide, grad.cpu().double())
    rows = got.numel() // max(1, got.shape[-1])
    of_sum = (min(rows, 256) + rows // 256 + 40) * 2.0**-24 * grad.cpu().double().abs()
    bounds = [grad.cpu().double() * 0, of_sum.reshape(rows, got.shape[-1]).sum(0)]
    for i, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_within(f"gradient {i}", value.cpu(), wanted, bounds[i % 2])


@pytest.mark.parametrize("n", [1, 7, 16, 33, 1000, 4104])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values(form: str, dtype: torch.dtype, n: int, device: str) -> None:
    assert_right(arguments((19, n), [dtype] * FORMS[form], device))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 8), (0, 8), (3, 0), (259, 40), (2100, 9)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    assert_right(arguments(shape, [F32] * 4, device))


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 4), (2, 4, 4, 4), (2, 3, 1, 1), (2, 1, 4, 5), (0, 3, 2, 2)]
)
def test_images(shape: tuple[int, ...], device: str) -> None:
    """Of the channels_last order, of which those with sizes of 1 are other orders too."""
    tensors = [make(shape, F32, seed, device) for seed in range(2)]
    x, other = (t.contiguous(memory_format=torch.channels_last) for t in tensors)
    bias, other_bias = (make(shape[1:2], F32, seed, device) for seed in (2, 3))
    rows = [t.permute(0, 2, 3, 1).contiguous() for t in (x, other)]
    leaves = [t.requires_grad_() for t in (x.clone(), bias, other.clone(), other_bias)]
    flat = [t.reshape(-1, shape[1]).requires_grad_() for t in rows]
    got = nhwc_bias_add(*leaves)
    want = nhwc_bias_add(flat[0], bias, flat[1], other_bias)
    assert got.shape == x.shape and got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got.permute(0, 2, 3, 1).reshape(want.shape), want)
    assert_within("images", got.detach().cpu(), nhwc_bias_add_ref(*leaves).detach().cpu(), 1e-6)
    grad = torch.ones((), device=device).expand(got.shape)
    found = torch.autograd.grad(got, leaves, grad)
    for i, value in enumerate(found):
        count = x.numel() // shape[1] if i % 2 else 1
        assert torch.equal(value, torch.full_like(leaves[i], count)), i


@pytest.mark.parametrize("others", DTYPES, ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
def test_mixtures(x: torch.dtype, others: torch.dtype, device: str) -> None:
    assert_right(arguments((9, 41), [x, others, BF16, F32], device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    x, other = (LAYOUTS[layout](make((48, 200), BF16, seed, device)) for seed in range(2))
    bias = make((2 * x.shape[-1],), BF16, 8, device)[::2]
    want = nhwc_bias_add(x.contiguous(), bias.contiguous(), other.contiguous(), bias.contiguous())
    assert torch.equal(nhwc_bias_add(x, bias, other, bias), want)


IMAGE = torch.ones(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)
REFUSED: dict[str, tuple[Tensor, ...]] = {
    "x is int64, expected float32, bfloat16 or float16": (torch.ones(2, 4).long(), torch.ones(4)),
    "bias has shape [3], expected [4]": (torch.ones(2, 4), torch.ones(3)),
    "x has strides [64, 16, 4, 1], expected those of channels_last; call x.contiguous("
    "memory_format=torch.channels_last)": (torch.ones(2, 4, 4, 4), torch.ones(4)),
    "other has strides [64, 16, 4, 1], expected those of channels_last; call other.contiguous("
    "memory_format=torch.channels_last)": (IMAGE, torch.ones(4), IMAGE.contiguous()),
    "other has shape [4], expected [2, 4]": (torch.ones(2, 4), torch.ones(4), torch.ones(4)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    nhwc_bias_add(torch.ones(4), torch.ones(4))  # loads the library, so that it refuses
    with pytest.raises(ValueError, match=f"^nhwc_bias_add: {re.escape(text)}$"):
        nhwc_bias_add(*REFUSED[text])


def test_refuses_a_bias_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"other_bias is given, expected other beside it$"):
        nhwc_bias_add(torch.ones(4), torch.ones(4), None, torch.ones(4))
