"""grouped_linear: its numbers, in every size, layout and share of rows, and its gradients."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from grouped_linear_cases import arguments, assert_right, offsets_of
from samples import DTYPES, F32, make
from torch import Tensor

from deepspeed_ext.ops import grouped_linear, grouped_linear_ref
from deepspeed_ext.ops.linear import grouped_products

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
COUNTS = {
    "one expert": [37],
    "some": [5, 1, 20, 3, 16],
    "none for the first and the last": [0, 9, 0, 0, 30, 0],
    "all to one": [0, 0, 0, 70, 0, 0, 0, 0],
    "none at all": [0, 0, 0],
    "more experts than rows": [int(e % 29 == 3) for e in range(200)],
    "blocks and a row": [64, 65, 63, 1],
}


@pytest.mark.parametrize("behind", [0, 7])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@each_dtype
def test_shares_of_rows(
    dtype: torch.dtype, counts: Sequence[int], behind: int, device: str
) -> None:
    for n, k in ((24, 16), (19, 21)):
        for bias in (False, True):
            made = arguments(counts, n, k, dtype, device, behind=behind, bias=bias)
            assert_right(*made)
            assert_right(*made, grad=make((made[0].shape[0], n), dtype, 5, device))


SIZES = [(1, 1), (7, 3), (1, 7), (8, 8), (15, 8), (8, 15), (64, 33), (129, 520), (5, 4095)]


@pytest.mark.parametrize(("n", "k"), SIZES)
@each_dtype
def test_sizes(dtype: torch.dtype, n: int, k: int, device: str) -> None:
    made = arguments([3, 0, 8, 40], n, k, dtype, device, behind=2)
    assert_right(*made, grad=make((53, n), dtype, 5, device))


@each_dtype
def test_many_rows(dtype: torch.dtype, device: str) -> None:
    """So many that sums over an expert's rows would show an accumulator of 16 bits."""
    made = arguments([3000, 0, 5000, 1], 9, 16, dtype, device, behind=100)
    assert_right(*made, grad=make((8101, 9), dtype, 5, device))
    assert_right(*made)


def test_more_experts_than_torch_takes(device: str) -> None:
    counts = [e % 3 for e in range(1500)]
    assert_right(*arguments(counts, 8, 8, torch.bfloat16, device, behind=1))


@pytest.mark.parametrize(("rows", "n"), [(0, 3), (5, 0)])
@each_dtype
def test_nothing(dtype: torch.dtype, rows: int, n: int, device: str) -> None:
    x, weight = make((rows, 4), dtype, 0, device), make((3, n, 4), dtype, 1, device)
    offsets, bias = offsets_of([0] * 3, device), make((3, n), dtype, 2, device)
    for given in (None, bias):
        for found in assert_right(x, weight, offsets, given):
            assert not found.any()


@each_dtype
def test_no_experts(dtype: torch.dtype, device: str) -> None:
    x, weight, offsets, bias = arguments([], 3, 4, dtype, device, behind=5)
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    got = grouped_linear(leaves[0], leaves[1], offsets, leaves[2])
    assert torch.equal(got.double(), grouped_linear_ref(x, weight, offsets, bias))
    got.sum().backward()
    assert x.grad is not None and not x.grad.any() and x.grad.shape == x.shape


@each_dtype
def test_rows_of_length_0_have_the_bias(dtype: torch.dtype, device: str) -> None:
    x, weight, offsets, bias = arguments([2, 0, 1], 5, 0, dtype, device, behind=1)
    assert bias is not None
    out, *_ = assert_right(x, weight, offsets, bias)
    assert torch.equal(out[:2], bias[:1].expand(2, 5)) and torch.equal(out[2], bias[2])
    assert not out[3].any() and not grouped_linear(x, weight, offsets).any()


def _odd_columns(x: Tensor) -> Tensor:
    return torch.cat([x, x, x], -1)[..., 1 : 1 + x.shape[-1]].copy_(x)


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _at_an_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "odd columns": _odd_columns,
    "transposed": _transposed,
    "odd address": _at_an_odd_address,
    "every second row": lambda x: torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :],
    "every second column": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "backwards, and back": lambda x: x.flip(0).flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    change = LAYOUTS[layout]
    for n, k in ((16, 24), (17, 19)):
        x, weight, offsets, bias = arguments([3, 0, 9], n, k, dtype, device, behind=1)
        grad = make((13, n), dtype, 5, device)
        want = assert_right(x, weight, offsets, bias, grad)
        there = (change(x), change(weight), change(offsets[:, None])[:, 0], bias)
        assert torch.equal(there[0], x) and torch.equal(there[1], weight)
        for got, right in zip(assert_right(*there, grad=change(grad)), want, strict=True):
            # Rows may be few to a kernel in one layout, and torch's in another.
            bound = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, right, rtol=bound, atol=bound)


@each_dtype
def test_one_weight_for_all(dtype: torch.dtype, device: str) -> None:
    """Expanded over the experts, over rows, over columns."""
    x, weight, offsets, bias = arguments([3, 0, 9], 16, 24, dtype, device)
    for expanded in (weight[:1], weight[:, :1], weight[:, :, :1]):
        assert_right(x, expanded.expand(weight.shape), offsets, bias)
    assert_right(x[:1].expand(x.shape), weight, offsets, bias)
    assert_right(x[:, :1].expand(x.shape), weight, offsets, bias)


@each_dtype
def test_what_is_behind_the_last_offset_reaches_nothing(dtype: torch.dtype, device: str) -> None:
    for n, k in ((16, 24), (5, 7)):
        for bad in (torch.nan, torch.inf):
            x, weight, offsets, bias = arguments([3, 0, 9], n, k, dtype, device, behind=5)
            grad = make((17, n), dtype, 5, device)
            want = assert_right(x, weight, offsets, bias, grad)
            x[12:], grad[12:] = bad, bad
            leaves = [each.requires_grad_() for each in (x, weight, bias) if each is not None]
            got = grouped_linear(leaves[0], leaves[1], offsets, leaves[2])
            found = [got, *torch.autograd.grad(got, leaves, grad)]
            assert not got[12:].any() and not found[1][12:].any()
            for each, right in zip(found, want, strict=True):
                assert torch.equal(each, right)


@each_dtype
def test_what_is_not_finite_stays_with_its_expert(dtype: torch.dtype, device: str) -> None:
    for n, k in ((16, 24), (5, 7)):
        x, weight, offsets, bias = arguments([3, 0, 9, 4], n, k, dtype, device, behind=1)
        assert bias is not None
        want = grouped_linear(x, weight, offsets, bias)
        weight[1], bias[1], weight[3], bias[3] = torch.nan, torch.inf, torch.inf, torch.nan
        x[0], grad = torch.nan, make((17, n), dtype, 5, device)
        leaf = weight.requires_grad_()
        got = grouped_linear(x, leaf, offsets, bias)
        assert got[0].isnan().all() and got[12:16].isnan().all() and not got[16].any()
        assert torch.equal(got[1:12], want[1:12])
        (of_weight,) = torch.autograd.grad(got, leaf, grad)
        assert of_weight[0].isnan().all() and not of_weight[1].any()
        assert of_weight[2:].isfinite().all()


@each_dtype
def test_the_same_bits_again(dtype: torch.dtype, device: str) -> None:
    for n, k in ((64, 96), (33, 41)):
        made = arguments([300, 0, 17, 200], n, k, dtype, device, behind=3)
        grad = make((520, n), dtype, 5, device)
        want = assert_right(*made, grad=grad)
        for _ in range(3):
            for got, right in zip(assert_right(*made, grad=grad), want, strict=True):
                assert torch.equal(got, right)


@pytest.mark.parametrize("workspace", [1, 4 * 19 * 21 * 3, 1 << 27])
@pytest.mark.parametrize("counts", [*COUNTS.values(), [1700, 0, 300, 5]])
def test_blocks(counts: list[int], workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA does where torch would read the offsets, here on the CPU."""
    monkeypatch.setattr(grouped_products, "_WORKSPACE", workspace)
    x, weight, offsets, _ = arguments(counts, 19, 21, F32, behind=6)
    x[-6:] = torch.nan
    grad = make((x.shape[0], 19), F32, 5)
    weights_of = partial(weight.index_select, 0)
    got = grouped_products.products_of_blocks(x, 19, 21, offsets, weights_of)
    want = grouped_linear_ref(x, weight, offsets)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    outer = grouped_products._outer_products_of_blocks(grad, x, offsets)
    leaf = weight.double().requires_grad_()
    (right,) = torch.autograd.grad(grouped_linear_ref(x, leaf, offsets), leaf, grad.double())
    torch.testing.assert_close(outer.double(), right, rtol=1e-5, atol=1e-4)


def test_gradients_of_gradients(device: str) -> None:
    twice = []
    x, weight, offsets, bias = arguments([3, 0, 9], 5, 7, F32, device, behind=2)
    for function, dtype in ((grouped_linear, F32), (grouped_linear_ref, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias) if t is not None]
        out = function(leaves[0], leaves[1], offsets, leaves[2])
        grads = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        loss = sum(grad.square().sum() for grad in grads)
        twice.append([t.double() for t in torch.autograd.grad(loss, leaves)])
    for got, want in zip(*twice, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("wanted", range(3))
def test_one_gradient(wanted: int, device: str) -> None:
    x, weight, offsets, bias = arguments([3, 0, 9], 5, 7, F32, device)
    given = [x, weight, bias]
    want = assert_right(x, weight, offsets, bias)[1 + wanted]
    leaf = given[wanted] = given[wanted].requires_grad_()
    grouped_linear(given[0], given[1], offsets, given[2]).sum().backward()
    assert torch.equal(leaf.grad, want)
