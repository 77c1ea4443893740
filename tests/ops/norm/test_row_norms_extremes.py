"""rms_norm and layer_norm of rows with a large mean, of huge, tiny and no values, inf and NaN."""

import pytest
import torch
from row_norm_cases import KINDS, LAYER, RMS, Kind, results_and_gradients
from samples import BF16, F16, F32, make
from tolerance import assert_within
from torch import Tensor

ROUNDING = torch.finfo(F32).eps / 2
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
LENGTHS = [9, 100, 128, 4096, 4100, 16384, 40_000, 262_144]


@pytest.mark.parametrize("mean", [1e4, -3e5])
@pytest.mark.parametrize("n", LENGTHS)
def test_small_deviations_from_a_large_mean(n: int, mean: float, device: str) -> None:
    """Each element is right beside 1, the size of a deviation, not beside the mean.

    A mean that is one float is off by up to 5e-4 of a deviation here, or 0.016 of one; the mean of
    squares less the square of the mean leaves nothing right at all.
    """
    x = make((5, n), F32, 0, device) + mean
    grad = make((5, n), F32, 1, device)
    weight = make((n,), F32, 2, device)
    arguments = {"x": x, "weight": weight}
    got = results_and_gradients(LAYER.op, arguments, [grad])
    wide = {name: tensor.cpu().double() for name, tensor in arguments.items()}
    want = results_and_gradients(LAYER.ref, wide, [grad.cpu().double()])
    bound = (n / 32 + 32) * ROUNDING
    largest = wide["weight"].abs().max()
    for name, size in (("out", 5.0), ("x", 20.0), ("weight", 50.0)):
        error = torch.full_like(want[name], bound * size * float(largest))
        assert_within(name, got[name].cpu(), want[name], error)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e4, -7.7e7, 1e18, -3e30])
def test_equal_elements_deviate_by_nothing(value: float, n: int, device: str) -> None:
    x = torch.full((3, n), value, device=device)
    bias = make((n,), F32, 0, device)
    got = LAYER.op(x, bias=bias)
    error = bias.abs().cpu().double() * 0 + 1e-6
    assert_within("out", got.cpu(), bias.cpu().double().expand(3, n), error.expand(3, n))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n > 32])
@pytest.mark.parametrize("begin", [300.0, -1e5])
def test_rows_that_begin_far_from_their_mean(n: int, begin: float, device: str) -> None:
    """As sums may be taken around the first elements; beside rows that do not."""
    x, grad = (make((5, n), F32, seed, device) for seed in range(2))
    x[1::2, :16] += begin
    weight = make((n,), F32, 2, device)
    arguments = {"x": x, "weight": weight}
    got = results_and_gradients(LAYER.op, arguments, [grad])
    wide = {name: tensor.cpu().double() for name, tensor in arguments.items()}
    want = results_and_gradients(LAYER.ref, wide, [grad.cpu().double()])
    for name in ("out", "x"):
        size = want[name].abs() + want[name].abs().mean(-1, keepdim=True)
        assert_within(name, got[name].cpu(), want[name], (n / 32 + 32) * ROUNDING * 8 * size)


@each_kind
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e18, 1e30])
def test_huge_and_tiny_values(
    kind: Kind, size: float, dtype: torch.dtype, n: int, device: str
) -> None:
    """Whose squares are no floats, nor the sums of them; beside ordinary rows."""
    x = make((5, n), F32, 0, device)
    x[1::2] *= size
    x = x.to(dtype)
    for eps in (0.0, 1e-6):
        got, want = kind.op(x, eps=eps).cpu(), kind.ref(x.cpu(), eps=eps)
        inverse = 1 / (x.cpu().double().square().mean(-1, keepdim=True) + eps).sqrt()
        scale = (x.cpu().double() * inverse).abs()
        error = (n / 32 + 32) * ROUNDING * (scale + scale.mean(-1, keepdim=True))
        assert_within(f"eps {eps}", got, want, error)


def rows_whose_sums_are_taken_again(rows: int, n: int, device: str) -> Tensor:
    """Far from where they begin, or with squares that are no floats, or both; beside others."""
    x = make((rows, n), F32, 0, device)
    x[1::7] += 300
    x[2::7, :8] += 300
    x[3::7] *= 1e30
    x[4::7] *= 1e-30
    x[5::7] *= 1e-21
    x[5::7, :8] += 3e-19
    x[6::7] *= 1e18
    x[6::7, :8] += 3e20
    return x.to(BF16)


@each_kind
@pytest.mark.parametrize("n", [16_385, 32_776, 65_544, 131_072])
def test_rows_in_clusters_whose_sums_are_taken_again(kind: Kind, n: int, device: str) -> None:
    x = rows_whose_sums_are_taken_again(7 if device == "cpu" else 70 * 65_536 // n, n, device)
    got, want = kind.op(x, eps=0.0), kind.ref(x.cpu().double(), eps=0.0)
    size = want.abs() + want.abs().mean(-1, keepdim=True)
    assert_within("out", got.cpu(), want, 2e-5 * size)
    for row in range(7):
        assert torch.equal(kind.op(x[row : row + 1], eps=0.0)[0], got[row])


@each_kind
@pytest.mark.parametrize("n", [16_385, 16_392, 32_776, 65_544, 131_072])
def test_gradients_in_clusters_whose_sums_are_taken_again(kind: Kind, n: int, device: str) -> None:
    """In so many rows that on CUDA clusters have several; alone and with frozen vectors, too."""
    rows = 7 if device == "cpu" else 160 * 131_072 // n
    x = rows_whose_sums_are_taken_again(rows, n, device)
    grad = make((rows, n), BF16, 1, device)
    vectors = {name: make((n,), BF16, 2 + i, device) for i, name in enumerate(kind.vectors)}
    got = results_and_gradients(kind.op, {"x": x} | vectors, [grad], eps=0.0)
    wide = {name: tensor.cpu().double() for name, tensor in ({"x": x} | vectors).items()}
    of_result = grad.cpu().double()
    want = results_and_gradients(kind.ref, wide, [of_result], eps=0.0)
    size = want["x"].abs() + want["x"].abs().amax(-1, keepdim=True)
    assert_within("x", got["x"].cpu(), want["x"], 4e-5 * size)
    terms = {"weight": of_result * kind.ref(wide["x"], eps=0.0), "bias": of_result}
    for name in vectors:
        size = terms[name].abs().sum(0)
        assert_within(name, got[name].cpu(), want[name], 4e-5 * (size + size.mean()))
    for row in range(7):
        one = slice(row, row + 1)
        leaf = x[one].clone().requires_grad_()
        (alone,) = torch.autograd.grad(kind.op(leaf, **vectors, eps=0.0), leaf, grad[one])
        assert torch.equal(alone[0], got["x"][row])


@each_kind
@pytest.mark.parametrize("n", [100, 128, 4096, 40_000])
@pytest.mark.parametrize("size", [1e-20, 1e-18, 1e18])
def test_gradients_of_huge_and_tiny_values(kind: Kind, size: float, n: int, device: str) -> None:
    x, grad = (make((5, n), F32, seed, device) for seed in range(2))
    x[1::2] *= size
    got = results_and_gradients(kind.op, {"x": x}, [grad])["x"].cpu()
    want = results_and_gradients(kind.ref, {"x": x.cpu().double()}, [grad.cpu().double()])["x"]
    error = (n / 32 + 32) * ROUNDING * 8 * want.abs().amax(-1, keepdim=True)
    assert_within("x", got, want, error.expand_as(want))


@each_kind
@pytest.mark.parametrize("n", [64 * 256 * 256, 16_777_215])
def test_long_rows_lose_no_digits(kind: Kind, n: int, device: str) -> None:
    """Nor their gradients: sums are as right as those of short rows."""
    pattern = make((1, 65_521), F32, 0) * 0.5 + 1  # whose sums a float loses digits of
    repeats = -(-n // pattern.numel())
    x = pattern.repeat(1, repeats)[:, :n].to(device)
    grad = (x.flip(-1) - 0.7).contiguous()
    leaf, wide = (t.clone().requires_grad_() for t in (x, x.cpu().double()))
    got, want = kind.op(leaf), kind.ref(wide)
    assert_within("out", got.detach().cpu(), want.detach(), 1e-6 * want.detach().abs() + 3e-7)
    (of_x,) = torch.autograd.grad(got, leaf, grad)
    (of_wide,) = torch.autograd.grad(want, wide, grad.cpu().double())
    assert_within("x", of_x.cpu(), of_wide, 2e-6 * of_wide.abs().mean().expand_as(of_wide))


@each_kind
def test_gradients_of_vectors_over_very_many_rows(kind: Kind, device: str) -> None:
    """Each is a sum over all rows; of terms of one sign, so that nothing hides an error."""
    rows = 400_000
    x = make((rows // 4, 8), F32, 0, device).abs().repeat(4, 1)
    vectors = {"weight": torch.ones(8, device=device)}
    vectors |= {"bias": torch.zeros(8, device=device)} if kind.centered else {}
    grad = torch.where(kind.op(x) > 0, 0.1, -0.1) * (1 + x)
    got = results_and_gradients(kind.op, {"x": x, **vectors}, [grad])
    wide = {name: tensor.cpu().double() for name, tensor in {"x": x, **vectors}.items()}
    want = results_and_gradients(kind.ref, wide, [grad.cpu().double()])
    magnitude = (want["out"] * grad.cpu().double()).abs().sum(0)
    assert_within("weight", got["weight"].cpu(), want["weight"], 1e-6 * magnitude)
    if kind.centered:
        magnitude = grad.cpu().double().abs().sum(0)
        assert_within("bias", got["bias"].cpu(), want["bias"], 1e-6 * magnitude)


@each_kind
def test_rows_of_zeros(kind: Kind, device: str) -> None:
    x = torch.zeros(2, 40, device=device)
    assert torch.equal(kind.op(x), x)
    assert kind.op(x, eps=0.0).isnan().all()


def test_a_row_of_one(device: str) -> None:
    x, bias = make((3, 1), F32, 0, device), make((1,), F32, 1, device)
    assert torch.equal(LAYER.op(x, bias=bias), bias.expand(3, 1))
    torch.testing.assert_close(RMS.op(x), x.sign(), rtol=1e-4, atol=0)


@each_kind
@pytest.mark.parametrize("n", [100, 128, 300, 4096, 40_000])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_only_the_row_of_what_is_not_finite(kind: Kind, bad: float, n: int, device: str) -> None:
    """Where it stands the result is NaN, with the mean everywhere in the row; no other row is."""
    arguments = kind.arguments((40, n), F32, device, F32)
    grads = [make((40, n), F32, seed, device) for seed in (8, 9)]

    def run() -> list[Tensor]:
        found = results_and_gradients(kind.op, arguments, grads)
        return [found[name] for name in ("out", "sum", "x", "residual")]

    clean = run()
    arguments["x"][2, 77] = bad
    out, total, *gradients = run()
    assert out[2, 77].isnan() and (not kind.centered or out[2].isnan().all())
    assert not total[2, 77].isfinite() and total[2].isfinite().sum() == n - 1
    others = [row for row in range(40) if row != 2]
    for got, want in zip((out, total, *gradients), clean, strict=True):
        assert torch.equal(got[others], want[others])


@each_kind
def test_sums_beyond_the_dtype_are_inf(kind: Kind, device: str) -> None:
    x = torch.full((2, 8), 6e4, dtype=F16, device=device)
    out, total = kind.op(x, residual=x)
    assert total.isinf().all() and out.isnan().all()
