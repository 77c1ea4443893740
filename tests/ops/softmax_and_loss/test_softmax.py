"""softmax: the right numbers and gradients, for every dtype, length, layout, option and mask."""

import pytest
import torch
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F16, F32, make
from softmax_cases import (
    IN_CLUSTERS,
    LENGTHS,
    LONG,
    OPTIONS,
    ROWS,
    assert_right,
    chosen,
    of_both,
)

from deepspeed_ext.ops import (
    scaled_masked_softmax,
    scaled_masked_softmax_ref,
    scaled_upper_triang_masked_softmax,
    scaled_upper_triang_masked_softmax_ref,
    softmax,
    softmax_ref,
)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("n", LENGTHS + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, device: str) -> None:
    assert_right(make((3 if n in LONG else ROWS, n), dtype, 0, device) * 3)


@pytest.mark.parametrize("n", IN_CLUSTERS)
@pytest.mark.parametrize("options", [{}, {"scale": -0.3}], ids=str)
def test_rows_that_a_cluster_shares(options: dict[str, float], n: int, device: str) -> None:
    assert_right(make((3, n), BF16, 0, device) * 3, **options)


@pytest.mark.parametrize("n", [9, 40, 201])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_options(dtype: torch.dtype, option: str, n: int, device: str) -> None:
    shape = (2, 3, 23, n)
    assert_right(make(shape, dtype, 0, device), **OPTIONS[option](device, shape))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("n", [16_400, 20_001])
def test_options_of_long_rows(option: str, n: int, device: str) -> None:
    shape = (1, 2, 6, n)
    assert_right(make(shape, BF16, 0, device), **OPTIONS[option](device, shape))


@pytest.mark.parametrize("shape", [(5,), (0, 8), (3, 0), (1, 1), (2, 0, 4), (0,), (1500, 40)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    assert_right(make(shape, F32, 0, device))
    assert_right(make(shape, F16, 0, device), causal=True, window=(1, -1))


@pytest.mark.parametrize("size", [1e-30, 1e4, 3e38])
def test_huge_and_tiny(size: float, device: str) -> None:
    x = make((9, 300), F32, 0, device).clamp(-1, 1) * size
    got, want = softmax(x).double(), x.double().softmax(-1)
    assert ((got - want).abs() <= 2e-5 * want + 1e-37).all()


@pytest.mark.parametrize("cap", [2e-30, 1e-3, 1.0, 30.0, 1e4, 1e6, 1e8, 1e30, 3e38])
def test_caps_of_any_size(cap: float, device: str) -> None:
    """A score far below its cap stays what it is; also where the gradient comes from."""
    x, grad = (make((9, 300), F32, seed, device).clamp(-1, 1) * 20 for seed in range(2))
    leaf, wide = (t.clone().requires_grad_() for t in (x, x.double()))
    got, want = softmax(leaf, softcap=cap), softmax_ref(wide, softcap=cap)
    assert ((got - want).abs() <= 2e-5 * want + 1e-37).all()
    (of_x,) = torch.autograd.grad(got, leaf, grad)
    (of_wide,) = torch.autograd.grad(want, wide, grad.double())
    slope = 1 - (x.double() / cap).tanh() ** 2  # in which digits cancel
    size = of_wide.abs() + 20 * want * (slope + 1e-10)
    assert ((of_x - of_wide).abs() <= 2e-5 * size + 1e-37).all()


def test_a_gradient_under_a_cap_where_the_mask_leaves_out_nan(device: str) -> None:
    """NaN there, of x or of what comes back, is in nothing."""
    x, grad = (make((4, 300), F32, seed, device) for seed in range(2))
    mask = chosen(device, (4, 300))
    want = of_both(x, grad, mask=mask, softcap=2.0)
    for value in (NAN, INF):
        bad = x.masked_fill(~mask, value), grad.masked_fill(~mask, value)
        for got, expected in zip(of_both(*bad, mask=mask, softcap=2.0), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("n", [5, 64, 300, 17_000])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_only_the_row_of_what_is_not_finite(bad: float, n: int, device: str) -> None:
    """All that takes part in it is NaN, the rest 0; what takes no part changes nothing."""
    x, grad = make((4, n), F32, 0, device), make((4, n), F32, 1, device)
    mask = torch.ones(4, n, dtype=torch.bool, device=device)
    mask[:, ::3] = False
    clean = softmax(x, mask)
    x[2, 4] = bad
    got = softmax(x, mask)
    assert got[2, mask[2]].isnan().all() and (got[2, ~mask[2]] == 0).all()
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    x[2, 4] = 1.0
    want = of_both(x, grad, mask=mask)
    x[:, 3] = bad  # left out
    grad[:, 3] = bad
    for value, expected in zip(of_both(x, grad, mask=mask), want, strict=True):
        assert torch.equal(value, expected)
    added = torch.zeros(4, n, device=device).masked_fill(~mask, -INF)
    assert torch.equal(softmax(x, added), want[0])


@pytest.mark.parametrize("n", [32_776, 65_536, 131_072])
def test_a_row_that_a_cluster_shares_is_the_same_everywhere(n: int, device: str) -> None:
    """Beside rows that are not finite or have no part, alone, and where it is not aligned."""
    rows = 5 if device == "cpu" else 300
    x = make((rows, n), BF16, 0, device) * 3
    x[1, :: n - 1] = 50.0  # the largest are the first and the last
    x[1, 7] = -INF
    want = softmax(x)
    assert torch.equal(softmax(x), want)
    assert want[1, 0] == want[1, n - 1] == 0.5 and want[1, 7] == 0
    for row in (0, 1, rows - 1):
        assert torch.equal(softmax(x[row : row + 1])[0], want[row])
    bad = x.clone()
    bad[0, 3], bad[2, n - 1], bad[3] = NAN, INF, -INF
    bad[0, 9] = -INF
    got = softmax(bad)
    assert torch.equal(got[1], want[1]) and torch.equal(got[4:], want[4:])
    assert got[0].isnan().sum() == n - 1 and got[0, 9] == 0 and got[2].isnan().all()
    assert (got[3] == 0).all()
    room = torch.full((5 * n + 1,), NAN, dtype=BF16, device=device)
    room[1:].view(5, n).copy_(x[:5])
    assert torch.equal(softmax(room[1:].view(5, n)), want[:5])
    assert torch.equal(softmax(room[1:].view(5, n), scale=0.3), softmax(x, scale=0.3)[:5])


def test_minus_infinity_is_no_part(device: str) -> None:
    x = make((3, 70), BF16, 0, device)
    x[0, 7:] = -INF
    x[1] = -INF
    got = softmax(x)
    assert (got[0, 7:] == 0).all() and (got[1] == 0).all() and not got.isnan().any()


def test_minus_infinity_beside_nan(device: str) -> None:
    x = torch.tensor([[1.0, NAN, -INF, 2.0], [-INF, INF, 3.0, -INF]], device=device)
    for found in (softmax(x), softmax_ref(x)):
        assert found.isnan().tolist() == [[True, True, False, True], [False, True, True, False]]
        assert not found[x == -INF].any()


@pytest.mark.parametrize("n", [40, 300, 16_400])
def test_a_row_of_which_nothing_takes_part(n: int, device: str) -> None:
    x, grad = make((4, n), F32, 0, device), make((4, n), F32, 1, device)
    mask = torch.ones(4, 1, dtype=torch.bool, device=device)
    mask[1] = False
    out, grad_x = of_both(x, grad, mask=mask)
    assert (out[1] == 0).all() and (grad_x[1] == 0).all()
    out, grad_x = of_both(x, grad, causal=True, offset=-2)
    assert (out[:2] == 0).all() and (grad_x[:2] == 0).all() and out[2, 0] == 1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    x, grad = (LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(2))
    for options in ({}, dict(causal=True, softcap=2.0)):
        want = of_both(x.contiguous(), grad.contiguous(), **options)
        for got in (of_both(x, grad.contiguous(), **options), of_both(x.contiguous(), grad)):
            if "softcap" in options and got[0] is not want[0]:
                got = of_both(x, grad, **options)
            for value, expected in zip(got, want, strict=True):
                assert torch.equal(value, expected)


@pytest.mark.parametrize("kind", [torch.bool, F32, BF16], ids=str)
def test_masks_are_read_where_they_lie(kind: torch.dtype, device: str) -> None:
    """Of any strides and alignment: the bits are those of one that is expanded."""
    x = make((2, 3, 16, 72), F32, 0, device)
    room = make((3, 5, 33, 160), F32, 1, device)
    room = room > -1 if kind == torch.bool else room.to(kind)
    masks = [
        room[0, 0, 0, 1:73],
        room[0, 0, :16, 3:75],
        room[:2, :3, ::2, 80:152][:, :, :16],
        room[:2, :1, 1:17, ::2][..., :72],
        room[0, :3, :16, :1],
        room[0, 0, 0, 5],
        room[:2, 0, 0, :72][:, None, None],
        room.permute(3, 2, 1, 0)[:72, :16, :3, :2].permute(3, 2, 1, 0),
    ]
    for mask in masks:
        want = softmax(x, mask.expand(x.shape).contiguous())
        assert torch.equal(softmax(x, mask), want)


@pytest.mark.parametrize("shape", [(2, 3, 5, 40), (5, 40), (3, 1, 40), (1,), (2, 1, 1, 40)])
def test_the_gradient_of_an_additive_mask(shape: tuple[int, ...], device: str) -> None:
    x, grad = make((2, 3, 5, 40), F32, 0, device), make((2, 3, 5, 40), F32, 1, device)
    mask = make(shape, F32, 2, device)
    options = dict(scale=0.5, softcap=2.0, causal=True)
    leaves = [t.clone().requires_grad_() for t in (x, mask)]
    got = torch.autograd.grad(softmax(*leaves, **options), leaves, grad)
    wide = [t.double().requires_grad_() for t in (x, mask)]
    want = torch.autograd.grad(softmax_ref(*wide, **options), wide, grad.double())
    for value, expected in zip(got, want, strict=True):
        assert value.shape == expected.shape
        torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-4)
    only_mask = mask.clone().requires_grad_()
    (alone,) = torch.autograd.grad(softmax(x, only_mask, **options), only_mask, grad)
    assert torch.equal(alone, got[1])


def test_reference_has_the_right_gradient() -> None:
    """By finite differences, so that comparing gradients with the reference's means something."""
    x = make((2, 3, 6), F32, 0).double().requires_grad_()
    added = make((3, 6), F32, 1).double().requires_grad_()
    mask = chosen("cpu", (2, 3, 6))
    assert torch.autograd.gradcheck(lambda a: softmax_ref(a, mask, softcap=2.0, scale=0.7), (x,))
    slopes = torch.tensor([0.1, 0.2])
    assert torch.autograd.gradcheck(
        lambda a, b: softmax_ref(a, b, causal=True, alibi_slopes=slopes), (x, added)
    )


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_as_torch_does(dtype: torch.dtype, device: str) -> None:
    """Its softmax; and the masks and the causality of its attention."""
    x = make((50, 700), dtype, 0, device)
    torch.testing.assert_close(softmax(x), x.double().softmax(-1).to(dtype))
    q, k = make((2, 3, 9, 8), F32, 1, device), make((2, 3, 14, 8), F32, 2, device)
    v = torch.eye(14, device=device).expand(2, 3, 14, 14)
    scores = q @ k.transpose(-1, -2)
    mask = make((2, 1, 9, 14), F32, 3, device) > -1.5
    for ours, theirs in (
        (dict(mask=mask), dict(attn_mask=mask)),
        (dict(causal=True, offset=0), dict(is_causal=True)),
    ):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **theirs)
        torch.testing.assert_close(softmax(scores, scale=8**-0.5, **ours), want)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_familiar_names(dtype: torch.dtype, device: str) -> None:
    """What their mask has a 1 for is left out, and a row of which all is left out is zeros."""
    x = make((2, 3, 9, 40), dtype, 0, device)
    mask = ~chosen(device, (2, 1, 9, 40))
    want = softmax(x, ~mask, scale=0.5)
    for theirs in (mask, mask.to(torch.uint8), mask.to(torch.uint8) * 255):
        assert torch.equal(scaled_masked_softmax(x, theirs, 0.5), want)
        torch.testing.assert_close(want, scaled_masked_softmax_ref(x, theirs, 0.5).to(dtype))
    assert torch.equal(scaled_masked_softmax(x, None, 0.5), softmax(x, scale=0.5))
    square = x.view(6, 9, 40)[..., 1:10]
    want = softmax(square, scale=0.5, mask=torch.ones(9, 9, device=device).tril() > 0)
    got = scaled_upper_triang_masked_softmax(square, 0.5)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, scaled_upper_triang_masked_softmax_ref(square, 0.5).to(dtype))
    with pytest.raises(ValueError, match=r"^softmax: mask is float32, expected bool or uint8, of"):
        scaled_masked_softmax(x, mask.float(), 0.5)
