"""rms_norm and layer_norm: the right numbers and gradients, for every dtype, length and form."""

from typing import Any

import pytest
import torch
from row_layouts import LAYOUTS
from row_norm_cases import (
    IN_CLUSTERS,
    KINDS,
    LAYER,
    LENGTHS,
    LONG,
    RMS,
    Kind,
    results_and_gradients,
)
from samples import BF16, DTYPES, F16, F32, make
from tolerance import assert_within
from torch import Tensor

ROUNDING = torch.finfo(F32).eps / 2
ROWS = 37

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def assert_right(kind: Kind, arguments: dict[str, Tensor], **options: Any) -> None:
    """Compare results and gradients with the reference, element by element.

    A sum of n terms in float32 adds up what each of 32 running sums, or of the threads of a team,
    has: at most n / 32 + 8 roundings of the sum of the magnitudes; few other roundings follow. The
    sum with a residual is compared as it was rounded, and so it is normalized.
    """
    x = arguments["x"]
    shape, device = tuple(x.shape), str(x.device)
    with_sum = "residual" in arguments
    grads = [make(shape, x.dtype, 90, device)]
    if with_sum and options.get("return_sum", True):
        grads.append(make(shape, arguments["residual"].dtype, 91, device))
    got = results_and_gradients(kind.op, arguments, grads, **options)
    wide = {name: tensor.cpu().double() for name, tensor in arguments.items()}
    if with_sum:
        total = got["sum"] if "sum" in got else kind.op(**arguments)[1]
        added = wide["x"] + wide.get("x_bias", 0)
        error = 2 * ROUNDING * (added.abs() + wide["x"].abs() + wide["residual"].abs())
        assert_within("sum", total.cpu(), added + wide["residual"], error)
        wide["residual"] = total.cpu().double() - added
    grads = [grad.cpu().double() for grad in grads]
    want = results_and_gradients(kind.ref, wide, grads, **options)
    bounds = errors(kind, wide, want, grads, **options)
    for name, value in got.items():
        bound = bounds[name]
        if name == "x" and with_sum and arguments["residual"].dtype != x.dtype:
            # It is rounded to the dtype of the sum first.
            bound = bound + want[name].abs() * torch.finfo(arguments["residual"].dtype).eps
        assert value.shape == want[name].shape
        assert_within(name, value.cpu(), want[name], bound)


def errors(
    kind: Kind,
    wide: dict[str, Tensor],
    want: dict[str, Tensor],
    grads: list[Tensor],
    **options: Any,
) -> dict[str, Tensor]:
    """Bound what float32 arithmetic does to each result and gradient."""

    def mean(tensor: Tensor) -> Tensor:
        return tensor.mean(-1, keepdim=True)

    total = wide["x"] + wide.get("residual", 0) + wide.get("x_bias", 0)
    n = max(1, total.shape[-1])
    of_sum = (n / 32 + 16) * ROUNDING
    deviation = total - mean(total) if kind.centered else total
    eps = options.get("eps", 1e-5 if kind.centered else 1e-6)
    inverse = 1 / (mean(deviation.square()) + eps).sqrt()
    scale = wide["weight"] + options.get("weight_offset", 0) if "weight" in wide else 1
    # Of a deviation, and of a weighted gradient less the mean; both mean magnitudes may be off.
    size, weighted = deviation.abs(), (grads[0] * scale).abs()
    if kind.centered:
        size, weighted = size + mean(size), weighted + mean(weighted)
    found = {"out": of_sum * (size * inverse * scale).abs() + 2 * ROUNDING * want["out"].abs()}
    if "bias" in wide:
        found["out"] = found["out"] + 2 * ROUNDING * wide["bias"].abs()
    along = mean(weighted * size) * inverse**2 * size
    found["x"] = 4 * of_sum * (weighted + along) * inverse
    if len(grads) > 1:
        found["sum"] = ROUNDING * total.abs()
        found["x"] = found["x"] + ROUNDING * (grads[1].abs() + want["x"].abs())
    found["residual"] = found["x"]

    def over_rows(terms: Tensor) -> Tensor:
        return terms.reshape(total.numel() // n, total.shape[-1]).sum(0)

    of_rows = of_sum + (min(total.numel() // n, 256) + 80) * ROUNDING
    found["weight"] = of_rows * over_rows((grads[0] * size * inverse).abs())
    found["bias"] = of_rows * over_rows(grads[0].abs())
    found["x_bias"] = over_rows(found["x"]) + of_rows * over_rows(want["x"].abs())
    return found


@each_kind
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("n", LENGTHS + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(kind: Kind, dtype: torch.dtype, n: int, with_residual: bool, device: str) -> None:
    shape = (3 if n in LONG else ROWS, n)
    assert_right(kind, kind.arguments(shape, dtype, device, dtype if with_residual else None))


@each_kind
@pytest.mark.parametrize("n", IN_CLUSTERS)
@pytest.mark.parametrize("vectors", [BF16, F32, None], ids=str)
def test_rows_that_a_cluster_shares(
    kind: Kind, vectors: torch.dtype | None, n: int, device: str
) -> None:
    """On CUDA those without vectors also have their gradients from clusters."""
    arguments = kind.arguments((3, n), BF16, device, vectors=vectors)
    if vectors is None:
        arguments = {"x": arguments["x"]}
    assert_right(kind, arguments)
    assert_right(kind, arguments, eps=0.5)


@each_kind
@pytest.mark.parametrize(
    ("rows", "n", "vectors"),
    [(1100, 16_392, BF16), (300, 65_536, BF16), (190, 106_504, F32), (150, 131_072, BF16)],
)
def test_gradients_of_vectors_in_clusters(
    kind: Kind, rows: int, n: int, vectors: torch.dtype, device: str
) -> None:
    """So many rows that on CUDA most multiprocessors have a part of some."""
    rows = rows if device == "cuda" else 3
    assert_right(kind, kind.arguments((rows, n), BF16, device, vectors=vectors))


@each_kind
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(
    ("n", "dtype", "vectors"),
    [(264, BF16, BF16), (264, F32, F32), (264, BF16, F32), (1032, F16, F16), (4096, BF16, BF16)],
)
def test_gradients_of_vectors_over_many_rows(
    kind: Kind, n: int, dtype: torch.dtype, vectors: torch.dtype, with_residual: bool, device: str
) -> None:
    """So many rows that on CUDA each team of threads adds up those that it has."""
    residual, rows = dtype if with_residual else None, 2600 if device == "cuda" else 70
    arguments = kind.arguments((rows, n), dtype, device, residual, vectors)
    arguments.pop("x_bias", None)  # its gradient is added up down the columns
    assert_right(kind, arguments)


@each_kind
@pytest.mark.parametrize(
    "shape", [(5,), (2, 3, 4, 8), (0, 8), (3, 0), (1, 1), (2, 0, 4), (1500, 40), (0,)]
)
def test_shapes(kind: Kind, shape: tuple[int, ...], device: str) -> None:
    plain = kind.arguments(shape, F32, device)
    added = kind.arguments(shape, F32, device, F32)
    for arguments in (plain, added):
        assert_right(kind, arguments)
        for without in ("weight", "bias", "x_bias"):
            assert_right(kind, {n: t for n, t in arguments.items() if n != without})


@each_kind
@pytest.mark.parametrize("n", [40, 41, 3000])
@pytest.mark.parametrize("vectors", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
def test_mixtures(
    kind: Kind,
    x: torch.dtype,
    residual: torch.dtype | None,
    vectors: torch.dtype,
    n: int,
    device: str,
) -> None:
    assert_right(kind, kind.arguments((9, n), x, device, residual, vectors))


@each_kind
@pytest.mark.parametrize("vector", ["weight", "bias", "x_bias"])
def test_vectors_of_two_dtypes(kind: Kind, vector: str, device: str) -> None:
    arguments = kind.arguments((9, 256), BF16, device, BF16)
    if vector in arguments:
        arguments[vector] = arguments[vector].float()
    assert_right(kind, arguments)


@each_kind
@pytest.mark.parametrize("n", [1, 40, 3000, 20_000])
@pytest.mark.parametrize("residual", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_normed_sum_alone(
    kind: Kind, dtype: torch.dtype, residual: torch.dtype, n: int, device: str
) -> None:
    """As a block that normalizes last has it: the same bits whether a gradient is recorded."""
    arguments = kind.arguments((9, n), dtype, device, residual)
    assert_right(kind, arguments, return_sum=False)
    out, _ = kind.op(**arguments)
    assert torch.equal(kind.op(**arguments, return_sum=False), out)
    arguments["x"] = arguments["x"].requires_grad_()
    assert torch.equal(kind.op(**arguments, return_sum=False), out)


@each_kind
@pytest.mark.parametrize("offset", [1.0, -0.5])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_weight_offset(kind: Kind, dtype: torch.dtype, offset: float, device: str) -> None:
    for residual in (None, dtype):
        arguments = kind.arguments((9, 200), dtype, device, residual)
        assert_right(kind, arguments, weight_offset=offset)
        del arguments["weight"]
        assert torch.equal(
            as_tuple(kind.op(**arguments))[0],
            as_tuple(kind.op(**arguments, weight_offset=offset))[0],
        )


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@each_kind
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps(kind: Kind, eps: float, device: str) -> None:
    arguments = kind.arguments((5, 64), F32, device)
    arguments["x"] *= 1e-3
    assert_right(kind, arguments, eps=eps)


@each_kind
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind: Kind, layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    made = [LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(4)]
    n = made[0].shape[-1]
    dense = [tensor.contiguous() for tensor in made]
    names = [*kind.vectors, "x_bias"]
    vectors = {name: make((2 * n,), dtype, 8, device)[::2] for name in names}

    def run(x: Tensor, residual: Tensor, *grads: Tensor) -> list[Tensor]:
        arguments = {"x": x, "residual": residual} | vectors
        return [*results_and_gradients(kind.op, arguments, list(grads)).values()]

    want = run(*dense)
    vectors = {name: vector.contiguous() for name, vector in vectors.items()}
    for i in range(4):
        mixed = [*dense[:i], made[i], *dense[i + 1 :]]
        for got, expected in zip(run(*mixed), want, strict=True):
            assert torch.equal(got, expected)


@each_kind
def test_only_one_of_the_results_is_used(kind: Kind, device: str) -> None:
    arguments = kind.arguments((70, 64), F32, device, F32)
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    out, total = kind.op(**arguments)
    grad = make((70, 64), F32, 3, device)
    got = torch.autograd.grad(total, leaves, grad, retain_graph=True, allow_unused=True)
    found = dict(zip(arguments, got, strict=True))
    assert torch.equal(found["x"], grad) and torch.equal(found["residual"], grad)
    torch.testing.assert_close(found["x_bias"], grad.sum(0))
    assert all(found[name] is None for name in kind.vectors)
    got = torch.autograd.grad(out, leaves, grad)
    found = dict(zip(arguments, got, strict=True))
    plain = {"x": total.detach()} | {name: arguments[name] for name in kind.vectors}
    want = results_and_gradients(kind.op, plain, [grad])
    for name in plain:
        assert torch.equal(found[name], want[name])
    assert torch.equal(found["residual"], want["x"])


@each_kind
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
def test_only_what_is_asked_for(kind: Kind, with_residual: bool, device: str) -> None:
    """The gradient of each argument alone is what it is beside the others."""
    arguments = kind.arguments((40, 64), F32, device, F32 if with_residual else None)
    grads = [make((40, 64), F32, seed, device) for seed in (6, 7)]
    want = results_and_gradients(kind.op, arguments, grads)
    for name, tensor in arguments.items():
        leaf = tensor.detach().requires_grad_()
        results = as_tuple(kind.op(**arguments | {name: leaf}))
        of_results = grads[: len(results)]
        (got,) = torch.autograd.grad(results, leaf, of_results)
        assert torch.equal(got, want[name])
    with torch.no_grad():
        assert not as_tuple(kind.op(**arguments))[0].requires_grad


@each_kind
def test_reference_has_the_right_gradient(kind: Kind) -> None:
    """By finite differences, so that comparing gradients with the reference's means something."""
    for residual in (None, F32):
        arguments = kind.arguments((3, 6), F32, residual=residual)
        leaves = [tensor.double().requires_grad_() for tensor in arguments.values()]

        def run(*tensors: Tensor, names: tuple[str, ...] = tuple(arguments)) -> Any:
            return kind.ref(**dict(zip(names, tensors, strict=True)), weight_offset=1.0)

        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_as_torch_does(dtype: torch.dtype, device: str) -> None:
    x = make((50, 700), dtype, 0, device)
    weight, bias = (make((700,), dtype, seed, device) for seed in (1, 2))
    wide = (x.double(), (700,), weight.double())
    want = torch.nn.functional.rms_norm(*wide, 1e-6)
    torch.testing.assert_close(RMS.op(x, weight), want.to(dtype))
    want = torch.nn.functional.layer_norm(*wide, bias.double(), 1e-5)
    torch.testing.assert_close(LAYER.op(x, weight, bias), want.to(dtype))
