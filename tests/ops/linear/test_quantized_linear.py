"""quantized_linear: its numbers, in every size, layout and form, and its gradients."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import NAMES, ROUNDING
from quantized_linear_cases import (
    EVERYTHING,
    INTEGERS,
    WEIGHTS,
    arguments,
    assert_right,
    fused,
    integer_sums,
    on_cpu,
    weight_of,
)
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import (
    bias_activation,
    fake_quantize,
    gated_activation,
    quantized_linear,
    quantized_linear_ref,
    unpack_weight,
    unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.formats import NF4_LEVELS
from deepspeed_ext.ops.quantization.packed_weight import signed_codes

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", WEIGHTS, ids=str)
each_integer = pytest.mark.parametrize("kind", INTEGERS, ids=str)
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 63, 64)


@each_kind
@each_dtype
def test_numbers_of_rows(dtype: torch.dtype, kind: tuple[str, bool], device: str) -> None:
    for rows in ROWS:
        assert_right(*arguments(rows, 37, 83, dtype, kind, 32, device))
        assert_right(*arguments(rows, 40, 256, dtype, kind, 128, device))


# Around every width of vectors, runs, units, lines, blocks and chunks.
SIZES = [(1, 1), (7, 3), (1, 7), (17, 16), (33, 15), (70, 33), (64, 64), (129, 520), (31, 1000)]
SIZES += [(140, 130), (5, 2047), (6, 4104), (3, 9001)]


@pytest.mark.parametrize(("n", "k"), SIZES)
@each_kind
def test_sizes(kind: tuple[str, bool], n: int, k: int, device: str) -> None:
    for rows, group in itertools.product((1, 5), (32, 64, 77, 128, k)):
        assert_right(*arguments(rows, n, k, BF16, kind, group, device))


GROUPS = (1, 2, 5, 16, 20, 31, 32, 33, 48, 64, 80, 96, 128, 160, 192, 256, 299, 300)


@pytest.mark.parametrize("group", GROUPS)
@each_kind
def test_group_sizes(kind: tuple[str, bool], group: int, device: str) -> None:
    for rows in (1, 2, 11):
        assert_right(*arguments(rows, 21, 300, F32, kind, group, device))


@pytest.mark.parametrize("k", [16384 + 40, 2 * 16384 + 4096])
@pytest.mark.parametrize("group", [32, 48, 100, 128, 1 << 20])
@each_kind
def test_long_rows(kind: tuple[str, bool], group: int, k: int, device: str) -> None:
    for rows in (1, 6):
        assert_right(*arguments(rows, 18, k, BF16, kind, group, device))


@pytest.mark.parametrize("rows", [1, 11, 64])
@each_dtype
def test_forms(dtype: torch.dtype, rows: int, device: str) -> None:
    """Every option alone and with each other."""
    for i, (bias, residual, activation) in enumerate(
        itertools.product((False, True), (False, True), (None, *NAMES))
    ):
        for gated in (False, True) if activation else (False,):
            form = dict(bias=bias, residual=residual, activation=activation, gated=gated)
            kind = WEIGHTS[i % len(WEIGHTS)]
            assert_right(*arguments(rows, 39, 70, dtype, kind, 32, device, **form))
            if kind in INTEGERS:
                made = arguments(rows, 39, 70, dtype, kind, 32, device, **form)
                assert_right(*made, input_format="int8")


@pytest.mark.parametrize(
    "shape", [(8,), (1, 8), (2, 3, 8), (0, 8), (2, 0, 8), (3, 0), (0,), (2, 1, 0)]
)
@pytest.mark.parametrize("n", [0, 1, 6])
@pytest.mark.parametrize("input_format", [None, "int8"])
def test_shapes(shape: tuple[int, ...], n: int, input_format: str | None, device: str) -> None:
    for kind, form in itertools.product(INTEGERS, ({}, dict(activation="silu", gated=True))):
        x, weight = (
            make(shape, F32, 0, device),
            weight_of(2 * n if form else n, shape[-1], *kind, min(4, max(1, shape[-1])), device),
        )
        bias, residual = (make(s, F32, 2, device) for s in ((weight.shape[0],), (*shape[:-1], n)))
        given = dict(bias=bias, residual=residual, activation=None, gated=False) | form
        assert_right(x, weight, given, input_format)
        assert_right(x, weight, dict(bias=None, activation=None, gated=False) | form, input_format)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """The results are those of contiguous copies, bit for bit."""
    x, residual = (LAYOUTS[layout](make((48, 200), dtype, i, device)) for i in (0, 3))
    if "columns" in layout:
        x, residual = x[:50], residual[:50]
    n = residual.shape[-1]
    for kind, input_format in itertools.product(INTEGERS, (None, "int8")):
        weight = weight_of(n, x.shape[-1], *kind, 24, device)
        bias = make((2 * n,), dtype, 2, device)[::2]
        options = dict(activation="gelu", input_format=input_format)
        dense = [tensor.contiguous() for tensor in (x, bias, residual)]
        want = quantized_linear(dense[0], weight, dense[1], residual=dense[2], **options)
        got = quantized_linear(x, weight, bias, residual=residual, **options)
        assert torch.equal(got, want)


@each_kind
@each_dtype
def test_unaligned(dtype: torch.dtype, kind: tuple[str, bool], device: str) -> None:
    """Every argument one element further on, with the same bits."""
    x, weight, options = arguments(23, 40, 328, dtype, kind, 32, device, **EVERYTHING)
    want = assert_right(x, weight, options)

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        return room[1:].view(tensor.shape).copy_(tensor)

    others = dict(options, bias=moved(options["bias"]), residual=moved(options["residual"]))
    assert torch.equal(quantized_linear(moved(x), weight, **others), want)
    weight = weight._replace(
        codes=moved(weight.codes),
        scales=moved(weight.scales),
        offsets=None if weight.offsets is None else moved(weight.offsets),
    )
    assert torch.equal(quantized_linear(x, weight, **options), want)


@pytest.mark.parametrize("form", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("input_format", [None, "int8"])
@each_dtype
def test_what_is_not_finite_stays_in_its_row_and_column(
    dtype: torch.dtype, input_format: str | None, form: dict[str, Any], device: str
) -> None:
    sizes = ((1, 40, 96), (9, 33, 77), (12, 40, 4101), (64, 40, 4100))
    cases = itertools.product(INTEGERS, sizes, (32, 24))
    for kind, (rows, n, k), group in cases:
        x, weight, options = arguments(rows, n, k, dtype, kind, group, device, **form)
        options["input_format"] = input_format
        want = quantized_linear(x, weight, **options)
        bad_x, bad = x.clone(), weight._replace(scales=weight.scales.clone())
        if rows > 3:
            bad_x[-1, 0] = torch.nan  # behind the end of the row before
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            if rows > 3:
                bad_x[i, -1 - i] = value
            bad.scales[k // 2 // group, 2 * i] = value
        got = quantized_linear(bad_x, bad, **options)
        good = slice(3, -1) if rows > 3 else slice(None)
        assert torch.equal(got[good, 5:], want[good, 5:])
        assert not got[:, 0:5:2].isfinite().any()
        assert got[:1, 0].isnan().all()
        if rows > 3:
            assert not got[:3].isfinite().any() and got[0].isnan().all()
            assert input_format is None or got[:3].isnan().all()


@pytest.mark.parametrize("rows", [65, 300])
@each_dtype
def test_with_more_rows_it_is_torchs(rows: int, dtype: torch.dtype, device: str) -> None:
    for kind in WEIGHTS:
        x, weight, options = arguments(rows, 24, 41, dtype, kind, 16, device, bias=True)
        bias, residual = options["bias"], make((rows, 24), dtype, 3, device)
        floats = unpack_weight(weight, dtype)
        assert torch.equal(quantized_linear(x, weight, bias), F.linear(x, floats, bias))
        got = quantized_linear(x, weight, bias, activation="gelu", residual=residual)
        assert torch.equal(got, bias_activation(F.linear(x, floats), bias) + residual)
        got = quantized_linear(x, weight, bias, activation="silu", gated=True)
        assert torch.equal(got, gated_activation(F.linear(x, floats, bias)))
        with torch.autocast(device, dtype=BF16):
            assert quantized_linear(x, weight, bias).dtype == dtype
            assert quantized_linear(x[:3], weight, bias).dtype == dtype


@each_kind
@each_dtype
def test_more_rows_element_by_element(
    dtype: torch.dtype, kind: tuple[str, bool], device: str
) -> None:
    """Against float64: the weight is rounded to the dtype, parts of sums may be, and each step."""
    for bias, residual in itertools.product((False, True), (False, True)):
        given = arguments(300, 24, 200, dtype, kind, 48, device, bias=bias, residual=residual)
        x, weight, options = given
        got = quantized_linear(x, weight, **options)
        wide = {key: v.cpu().double() if isinstance(v, Tensor) else v for key, v in options.items()}
        want = quantized_linear_ref(x.cpu(), on_cpu(weight), **wide)
        floats, unit = unpack_weight_ref(on_cpu(weight)), torch.finfo(dtype).eps / 2
        reach = F.linear(x.cpu().double().abs(), floats.abs())
        sums = F.linear(x.cpu().double(), floats, wide["bias"]).abs()
        error = unit * (2 * reach + 2 * sums) + (2 * 200 + 8) * ROUNDING * reach
        assert got.dtype == dtype and got.shape == want.shape
        assert_within("out", got.cpu(), want, error)


@pytest.mark.parametrize("rows", [65, 300])
@each_dtype
def test_more_rows_are_rounded_too(rows: int, dtype: torch.dtype, device: str) -> None:
    """To the numbers that few rows have; torch multiplies what is left of them."""
    for kind, form in itertools.product(INTEGERS, FORMS):
        x, weight, options = arguments(rows, 24, 41, dtype, kind, 16, device, **form)
        got = quantized_linear(x, weight, **options, input_format="int8")
        assert torch.equal(got, quantized_linear(fake_quantize(x), weight, **options))


@pytest.mark.parametrize("k", [41, 128, 200])
@each_dtype
def test_more_rows_by_integers(dtype: torch.dtype, k: int, cuda: str) -> None:
    """The bits of few rows, up to the first step that torch rounds."""
    for kind, n, group in itertools.product((("int8", False), ("int8", True)), (24, 20), (k, 40)):
        x, weight, options = arguments(90, n, k, dtype, kind, group, cuda, bias=True)
        x[3] = 0
        x[4, 1] = torch.inf
        bias = options["bias"]
        want = quantized_linear(x[:64], weight, bias, input_format="int8")
        got = quantized_linear(x, weight, bias, input_format="int8")
        if kind[1] or n % 8 or group < k:  # torch has no such sums of integers
            want = quantized_linear(fake_quantize(x), weight, bias)
            assert torch.equal(got[5:], want[5:])
        else:
            assert torch.equal(got[:4], want[:4]) and torch.equal(got[5:64], want[5:])
            want = quantized_linear(x[26:], weight, bias, input_format="int8")
            assert torch.equal(got[64:], want[38:])
        assert got[4].isnan().all() and got[5:].isfinite().all()


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scales_near_the_largest_float(dtype: torch.dtype, format: str, device: str) -> None:
    """All is multiplied by powers of 2, and nothing on the way is too large: the same digits.

    Beside float32 the elements of the weight are floats themselves.
    """
    power = 119 if dtype is F32 else 126
    weight = weight_of(40, 256, format, False, 128, device)
    scales = torch.full_like(weight.scales, 1.25)
    x = make((40, 256), dtype, 0, device) * 2**-7
    x[3] = 0
    for rows in (1, 4, 16, 17, 40):
        want = quantized_linear(x[:rows], weight._replace(scales=scales))
        got = quantized_linear(x[:rows] * 2**-7, weight._replace(scales=scales * 2.0**power))
        assert torch.equal(got, want * 2.0 ** (power - 7))


@each_kind
def test_in_a_cuda_graph(kind: tuple[str, bool], cuda: str) -> None:
    """Alone in it, with the bits of the calls that it stands for."""
    ways = (None, "int8") if kind in INTEGERS else (None,)
    for rows, input_format in itertools.product((1, 9, 64), ways):
        x, weight, options = arguments(rows, 40, 264, BF16, kind, 264, cuda, **EVERYTHING)
        options["input_format"], start = input_format, x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            quantized_linear(start, weight, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                got = quantized_linear(start, weight, **options)
        for value in (x, x * 2, x.flip(0)):
            start.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(got, quantized_linear(value, weight, **options))


FORMS: list[dict[str, Any]] = [{}, dict(bias=True, residual=True, activation="gelu"), EVERYTHING]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("rows", [1, 20, 80])
@each_kind
def test_gradients(kind: tuple[str, bool], rows: int, form: dict[str, Any], device: str) -> None:
    """Those of the reference; all of them, and each alone."""
    x, weight, options = arguments(rows, 24, 40, F32, kind, 16, device, **form)
    tensors = {"x": x, "bias": options["bias"], "residual": options["residual"]}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    fixed = {name: options[name] for name in ("activation", "gated")}
    grad = make((rows, 24), F32, 9, device)

    def gradients(function: Any, used: Any, names: list[str], change: Any) -> list[Tensor]:
        leaves = {
            name: change(tensor.detach()).requires_grad_(name in names)
            for name, tensor in given.items()
        }
        out = function(weight=used, **leaves, **fixed)
        return list(torch.autograd.grad(out, [leaves[name] for name in names], change(grad)))

    names = list(given)
    want = gradients(quantized_linear_ref, on_cpu(weight), names, lambda t: t.cpu().double())
    for got, expected in zip(
        gradients(quantized_linear, weight, names, Tensor.clone), want, strict=True
    ):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-5, atol=2e-5)
    for name, expected in zip(names, want, strict=True):
        (got,) = gradients(quantized_linear, weight, [name], Tensor.clone)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-5, atol=2e-5)


def test_many_rows_go_where_torch_takes_them(device: str) -> None:
    """Batches of gradients, weights that were made for inference, gradients that there are not."""
    x, weight, options = arguments(80, 24, 200, F32, INTEGERS[0], 40, device, **EVERYTHING)
    x.requires_grad_()
    options["bias"].requires_grad_()
    out = quantized_linear(x, weight, **options)
    many = torch.randn(3, *out.shape, device=device)
    got = torch.autograd.grad(out, [x, options["bias"]], many, True, is_grads_batched=True)
    for i in range(3):
        want = torch.autograd.grad(out, [x, options["bias"]], many[i], True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one[i], other)
    with torch.inference_mode():
        fixed = weight._replace(scales=weight.scales.clone(), codes=weight.codes.clone())
    assert torch.equal(quantized_linear(x, fixed, **options), out)
    weight.scales.requires_grad_()
    for rows in (3, 80):
        options["residual"] = options["residual"][:rows]
        with pytest.raises(RuntimeError, match=r"^quantized_linear: scales requires a gradient"):
            quantized_linear(x[:rows], weight, **options)


@pytest.mark.parametrize("input_format", [None, "int8"])
@pytest.mark.parametrize("rows", [20, 80])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_keep_no_floats_of_the_weight(
    compiled: bool, rows: int, input_format: str | None, device: str
) -> None:
    """Of all layers of a model they would be there at a time, when adapters are trained."""
    torch.compiler.reset()
    function = quantized_linear
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for kind in INTEGERS[:1] if compiled else INTEGERS:
        x, weight, options = arguments(rows, 24, 200, BF16, kind, 40, device, **EVERYTHING)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):
            function(x.requires_grad_(), weight, **options, input_format=input_format)
        assert any(each.dtype == torch.uint8 for each in kept)
        assert not any(each.is_floating_point() and each.numel() == 48 * 200 for each in kept)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("rows", [1, 20, 80])
@each_integer
def test_gradients_of_rounded_rows(
    kind: tuple[str, bool], rows: int, form: dict[str, Any], device: str
) -> None:
    """That to x is what reaches the numbers that it was rounded to."""
    x, weight, options = arguments(rows, 24, 40, F32, kind, 40, device, **form)
    grad, near = make((rows, 24), F32, 9, device), x.clone().requires_grad_()
    got = torch.autograd.grad(
        quantized_linear(near, weight, **options, input_format="int8"), near, grad
    )
    far = fake_quantize(x).cpu().double().requires_grad_()
    wide = {key: v.cpu().double() if isinstance(v, Tensor) else v for key, v in options.items()}
    want = torch.autograd.grad(
        quantized_linear_ref(far, on_cpu(weight), **wide), far, grad.cpu().double()
    )
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("group", [1, 20, 32, 100, 128, 1 << 20])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 33), (20, 300), (3, 2048 + 100)])
@each_kind
def test_unpack_weight(kind: tuple[str, bool], n: int, k: int, group: int, device: str) -> None:
    """Each element is rounded to float32, as by one fused multiply-add, then to the dtype."""
    weight = weight_of(n, k, *kind, min(group, k), device)
    there = on_cpu(weight)
    numbers = signed_codes(there).float()
    if kind[0] == "nf4":
        numbers = torch.tensor(NF4_LEVELS)[numbers.long()]

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups[:, :n].t().repeat_interleave(weight.group_size, 1)[:, :k]

    want = numbers * spread(there.scales)
    if there.offsets is not None:
        numbers = numbers + (128 if kind[0] == "int8" else 8)
        want = fused(numbers, spread(there.scales), spread(there.offsets))
    for dtype in DTYPES:
        got = unpack_weight(weight, dtype)
        assert got.is_contiguous() and torch.equal(got.cpu(), want.to(dtype))
    far = (want.double() - unpack_weight_ref(there)).abs()
    assert (far <= 2.0**-23 * want.double().abs()).all()


@each_integer
def test_reference_of_rounded_rows(kind: tuple[str, bool]) -> None:
    """It rounds to nearest, too; at a tie to any of the two."""
    x, weight, _ = arguments(64, 30, 200, F32, kind, 32)
    x[3] = 0
    got = quantized_linear_ref(x, weight, input_format="int8")
    torch.testing.assert_close(got, integer_sums(x, weight).double(), rtol=1e-5, atol=1e-5)


INTEGER_CASES = [(37, 83, 32), (40, 256, 128), (21, 300, 20), (5, 77, 1), (66, 700, 48)]
INTEGER_CASES += [
    (70, 1024, 32),
    (33, 2100, 512),
    (20, 1300, 256),
    (9, 5000, 5000),
    (3, 70_000, 70_000),
    (3, 140_000, 131_000),
]


@pytest.mark.parametrize(("n", "k", "group"), INTEGER_CASES)
@each_integer
def test_integer_bits(kind: tuple[str, bool], n: int, k: int, group: int, device: str) -> None:
    """What quantized_linear.h says in exact integers, then float32 in the order of the groups."""
    for rows, dtype in zip((1, 2, 5), DTYPES, strict=True):
        x, weight, _ = arguments(rows, n, k, dtype, kind, group, device)
        got = quantized_linear(x, weight, input_format="int8")
        want = integer_sums(x.cpu(), on_cpu(weight)).to(dtype)
        assert torch.equal(got.cpu(), want)


@each_integer
def test_integer_bits_of_rows(kind: tuple[str, bool], device: str) -> None:
    for rows in ROWS:
        x, weight, _ = arguments(rows, 37, 200, BF16, kind, 64, device)
        got = quantized_linear(x, weight, input_format="int8")
        assert torch.equal(got.cpu(), integer_sums(x.cpu(), on_cpu(weight)).to(BF16))


@each_integer
def test_integers_of_extremes(kind: tuple[str, bool], device: str) -> None:
    """The largest sums there are, over as many elements as are summed up as integers."""
    k = 65536 + 33
    weight = weight_of(4, k, *kind, k, device)
    weight.codes.fill_(0x7F if kind[0] == "int8" else 0xFF)  # with offsets: 255
    for x in (torch.ones(2, k, device=device), -torch.ones(1, k, device=device)):
        got = quantized_linear(x, weight, input_format="int8")
        assert torch.equal(got.cpu(), integer_sums(x.cpu(), on_cpu(weight)))


@each_integer
def test_integer_rows_of_zeros_and_extremes(kind: tuple[str, bool], device: str) -> None:
    x = make((6, 100), F32, 0, device)
    x[0], x[1], x[2] = 0, 1e-44, x[2] * 3e37
    x[3] *= 1e-38
    x[4, 7] = torch.inf
    weight = weight_of(24, 100, *kind, 32, device)
    got = quantized_linear(x, weight, input_format="int8").cpu()
    want = integer_sums(x.cpu(), on_cpu(weight))
    assert torch.equal(got[[0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5]]) and got[4].isnan().all()
