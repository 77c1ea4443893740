"""quantize, dequantize and fake_quantize: their numbers, their bounds, and what is special."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from quantize_cases import (
    CASES,
    INTEGERS,
    KINDS,
    assert_as_reference,
    bits,
    numbers,
    options_of,
    round_trip,
    same,
    spread,
    values,
)
from row_layouts import LAYOUTS
from samples import DTYPES, F32, make
from torch import Tensor

from deepspeed_ext.ops import (
    dequantize,
    dequantize_ref,
    ds_quantizer,
    fake_quantize,
    fake_quantize_ref,
    quantize,
    quantize_ref,
)
from deepspeed_ext.ops.quantization.formats import NF4_LEVELS

each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LARGEST = 3.4028234663852886e38


@pytest.mark.parametrize("case", CASES, ids=str)
@each_kind
@each_dtype
def test_as_the_reference(
    dtype: torch.dtype, kind: tuple[str, bool], case: tuple[Any, ...], device: str
) -> None:
    x = values(case[0], dtype, device)
    assert_as_reference(x, kind, case)
    options = options_of(kind, case)
    made = quantize(x, **options)
    others = {name: options[name] for name in ("format", "group_size", "group_rows")}
    on_host = [None if part is None else part.cpu() for part in made]
    want = dequantize_ref(*on_host, **others, length=x.shape[-1])  # type: ignore[arg-type]
    for out in DTYPES:
        got = round_trip(x, options, out) if out == dtype else None
        got = dequantize(*made, **others, length=x.shape[-1], dtype=out) if got is None else got
        assert same(got, want.float().to(out))  # a product of two floats is exact in float64


@pytest.mark.parametrize("shape", [(70,), (1, 1, 70), (0, 3, 70), (2, 3, 70)])
@each_kind
def test_groups_of_more_rows_than_there_are(
    kind: tuple[str, bool], shape: tuple[int, ...], device: str
) -> None:
    """They have all rows, however many they may have, and a matrix of scales."""
    x = values(shape, F32, device)
    options = options_of(kind, (shape, 16, None))
    want = quantize(x, **options)
    groups = (min(x.numel() // 70, 1), 5)
    assert want.scales.shape == quantize(x.to("meta"), **options).scales.shape == groups
    assert quantize_ref(x.cpu(), **options).scales.shape == groups
    for rows in (7, 2**62, 2**63 - 1):
        more = options | {"group_rows": rows}
        for got, part in zip(quantize(x, **more), want, strict=True):
            assert got is part or same(got, part)
        assert same(round_trip(x, more, F32), fake_quantize(x, **options))
        assert same(fake_quantize(x, **more), fake_quantize(x, **options))


@each_kind
def test_layouts(kind: tuple[str, bool], device: str) -> None:
    """The results are those of contiguous copies, bit for bit."""
    for name, change in LAYOUTS.items():
        x = change(values((48, 200), F32, device))
        for group, rows in ((None, 1), (8, 1), (16, 3)):
            group = None if group is None else min(group, x.shape[-1])
            options = options_of(kind, (None, group, rows))
            for got, want in zip(
                quantize(x, **options), quantize(x.contiguous(), **options), strict=True
            ):
                assert got is None or same(got, want), name
            assert same(fake_quantize(x, **options), fake_quantize(x.contiguous(), **options))


@each_kind
def test_unaligned_and_strided(kind: tuple[str, bool], device: str) -> None:
    for dtype in DTYPES:
        x = values((20, 256), dtype, device)
        options = options_of(kind, (None, 64, 1))
        others = {name: options[name] for name in ("format", "group_size", "group_rows")}
        want = quantize(x, **options)
        floats = dequantize(*want, **others, dtype=dtype)

        def moved(tensor: Tensor) -> Tensor:
            room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
            return room[1:].view(tensor.shape).copy_(tensor)

        def apart(tensor: Tensor) -> Tensor:
            twice = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
            return twice.to(device)[..., ::2].copy_(tensor)

        for got, expected in zip(quantize(moved(x), **options), want, strict=True):
            assert got is None or same(got, expected)
        for change in (moved, apart):
            given = [None if part is None else change(part) for part in want]
            assert same(dequantize(*given, **others, dtype=dtype), floats)  # type: ignore[arg-type]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
groups = st.lists(finite, min_size=1, max_size=9) | st.lists(
    st.floats(-1, 1, width=32), min_size=1, max_size=40
)
property_of_groups = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@property_of_groups
@given(group=groups, size=st.integers(1, 40))
def test_integers_are_as_near_as_promised(
    kind: tuple[str, bool], group: list[float], size: int
) -> None:
    """In exact arithmetic: s / 2, with an offset 2^-16 s more; at random, twice that at most."""
    x = torch.tensor([group])
    options = options_of(kind, (None, min(size, len(group)), 1))
    for seed in (None, 3):
        made = quantize(x, **options, seed=seed)
        found = numbers(made.codes, kind, len(group))[0].tolist()
        scales = spread(made.scales, x, (None, options["group_size"], 1))[0].tolist()
        offsets = [0.0] * len(group)
        if made.offsets is not None:
            offsets = spread(made.offsets, x, (None, options["group_size"], 1))[0].tolist()
        for value, code, scale, offset in zip(group, found, scales, offsets, strict=True):
            error = abs(Fraction(value) - Fraction(code) * Fraction(scale) - Fraction(offset))
            slack = Fraction(0) if kind[1] else Fraction(1, 1 << 16)
            bound = Fraction(scale) * (Fraction(1, 1 if seed else 2) + slack)
            assert error < bound if seed and kind[1] else error <= bound
            if kind[1]:
                assert abs(code) <= (127 if kind[0] == "int8" else 7)


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_next_to_halves_the_nearer_one_is_chosen(kind: tuple[str, bool], device: str) -> None:
    """Where a rounded quotient is on the wrong side of a half; products are exact in float64."""
    most = {("int8", True): 127, ("int4", True): 7, ("int8", False): 255}.get(kind, 15)
    scales = make((600, 1), F32, 5).abs() + 0.01
    scales[300:] = (1 + scales[300:].frac()) * 2.0**-126  # half of one may have to be rounded
    halves = torch.arange(most, dtype=torch.float64) + 0.5
    near = (scales.double() * halves).float()
    rows = [torch.zeros(600, 1), scales * most, near]
    for _ in range(2):
        near = near.nextafter(torch.tensor(0.0))
        rows.append(near)
    x = torch.cat([*rows, near.nextafter(torch.tensor(9e9)).nextafter(torch.tensor(9e9))], 1)
    made = quantize(x.to(device), kind[0], symmetric=kind[1])
    scale = made.scales.cpu().double()
    error = (x.double() - numbers(made.codes, kind, x.shape[1]) * scale).abs()
    assert (error <= scale * (0.5 if kind[1] else 0.5 + 2**-16)).all()
    assert (error > scale * 0.4999).any()


@pytest.mark.parametrize("kind", KINDS[4:], ids=str)
@property_of_groups
@given(group=groups)
def test_floats_are_the_nearest(kind: tuple[str, bool], group: list[float]) -> None:
    """No other code stands for a number nearer to x, but for the rounding of x / s."""
    x = torch.tensor([group])
    made = quantize(x, kind[0])
    scale = Fraction(made.scales.item())
    if kind[0] == "nf4":
        points = [Fraction(level) for level in NF4_LEVELS]
    else:
        every = torch.arange(256, dtype=torch.uint8).view(made.codes.dtype).float()
        points = [Fraction(value) for value in every[every.isfinite()].tolist()]
    found = dequantize(made.codes, torch.ones_like(made.scales), format=kind[0], length=len(group))[
        0
    ].tolist()
    for value, point in zip(group, found, strict=True):
        quotient = Fraction(value) / scale
        error = abs(quotient - Fraction(point))
        assert error <= min(abs(quotient - other) for other in points) + abs(quotient) / 2**21


@each_kind
@property_of_groups
@given(group=groups, size=st.integers(1, 40))
def test_codes_of_what_codes_stand_for_are_the_same(
    kind: tuple[str, bool], group: list[float], size: int
) -> None:
    """But where scales end, and where the rounding of large offsets takes codes away."""
    x = torch.tensor([group])
    options = options_of(kind, (None, min(size, len(group)), 1))
    made = quantize(x, **options)
    reading = {name: options[name] for name in ("format", "group_size")}
    again = quantize(dequantize(*made, **reading, length=len(group)), **options)
    floor = (made.scales < 2.0**-120).any()  # the largest element may be far below the last code
    if made.offsets is not None:
        floor |= (made.offsets.abs() > made.scales * 2.0**14).any()
    assert floor or torch.equal(bits(again.codes), bits(made.codes))


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1] and k[0] != "nf4"], ids=str)
@property_of_groups
@given(group=groups, size=st.integers(1, 40))
def test_the_opposite_has_the_opposite_codes(
    kind: tuple[str, bool], group: list[float], size: int
) -> None:
    x, options = torch.tensor([group]), options_of(kind, (None, min(size, len(group)), 1))
    there, back = (fake_quantize(each, **options) for each in (x, -x))
    assert torch.equal(there, -back)


@pytest.mark.parametrize("kind", [k for k in INTEGERS if not k[1]], ids=str)
@property_of_groups
@given(group=groups, size=st.integers(1, 40))
def test_the_opposite_has_the_codes_from_the_other_end(
    kind: tuple[str, bool], group: list[float], size: int
) -> None:
    """With offsets: the same scale, and codes off by one at most, where they are halves."""
    x = torch.tensor([group]) / 4  # so that float32 has the range
    options = options_of(kind, (None, min(size, len(group)), 1))
    there, back = (quantize(each, **options) for each in (x, -x))
    assert torch.equal(there.scales, back.scales)
    codes, others = (numbers(made.codes, kind, len(group)) for made in (there, back))
    most = 255 if kind[0] == "int8" else 15
    scales = spread(there.scales, x, (None, options["group_size"], 1))
    is_flat = scales <= 2.0**-120  # as of elements that are all one
    assert bool((((codes + others - most).abs() <= 1) | is_flat).all())


@each_kind
def test_a_group_that_is_not_finite_is_nan_alone(kind: tuple[str, bool], device: str) -> None:
    for dtype in DTYPES:
        x = values((6, 160), dtype, device)
        options = options_of(kind, (None, 32, 1))
        want = quantize(x, **options)
        bad = x.clone()
        for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
            bad[row, 32 * row + 5 + row] = value
        got = quantize(bad, **options)
        per_byte = 1 if kind[0] in ("int8", "fp8_e4m3", "fp8_e5m2") else 2
        hit = torch.zeros(6, 5, dtype=torch.bool)
        hit[range(4), range(4)] = True
        assert torch.equal(got.scales.isnan().cpu(), hit)
        assert torch.equal(got.scales.cpu()[~hit], want.scales.cpu()[~hit])
        if got.offsets is not None and want.offsets is not None:
            assert (got.offsets.cpu()[hit] == 0).all()
            assert torch.equal(got.offsets.cpu()[~hit], want.offsets.cpu()[~hit])
        bytes_hit = hit.repeat_interleave(32 // per_byte, 1)
        found, expected = (each.codes.view(torch.uint8).cpu() for each in (got, want))
        assert (found[bytes_hit] == 0).all() and torch.equal(
            found[~bytes_hit], expected[~bytes_hit]
        )
        floats = round_trip(bad, options, F32)
        assert torch.equal(floats.isnan().cpu(), hit.repeat_interleave(32, 1))


@each_kind
def test_zeros_constants_and_extremes(kind: tuple[str, bool], device: str) -> None:
    options = options_of(kind, (None, None, 1))
    for value in (0.0, -0.0):
        zeros = torch.full((2, 40), value, device=device)
        made = quantize(zeros, **options)
        assert (made.scales == 2.0**-126).all()
        assert (round_trip(zeros, options, F32) == 0).all()
    rows = [[LARGEST, -LARGEST, 0, 1], [LARGEST] * 4, [-LARGEST] * 4, [1e-45, -1e-45, 0, 1e-44]]
    rows += [[3.7] * 4, [-1e-38] * 4, [LARGEST / 2, LARGEST, 1e38, LARGEST]]
    x = torch.tensor(rows, device=device)
    found = round_trip(x, options, F32).cpu().double()
    assert quantize(x, **options).scales.isfinite().all()
    scales = quantize(x, **options).scales.cpu().double()
    step = {"nf4": 0.16, "fp8_e4m3": 16.0, "fp8_e5m2": 4096.0}.get(kind[0], 0.5)
    assert ((found - x.cpu().double()).abs() <= scales * step * (1 + 2**-12)).all()
    if not kind[1]:  # the offset is all of a constant
        assert torch.equal(found[[1, 2, 4, 5]], x.cpu().double()[[1, 2, 4, 5]])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_all_codes_of_8_bit_floats_are_torchs(name: str, device: str) -> None:
    dtype = torch.float8_e4m3fn if name == "fp8_e4m3" else torch.float8_e5m2
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    got = dequantize(codes.to(device), torch.ones(1, device=device), format=name)
    assert same(got.nan_to_num(7, 1e9, -1e9).cpu(), codes.float().nan_to_num(7, 1e9, -1e9))
    x = torch.cat([make((50_000,), F32, 3) * 2.0**k for k in range(-14, 1)])
    made = quantize(x.to(device), name)
    want = (x * made.scales.reciprocal().cpu()).to(dtype)
    assert same(made.codes, want)


def test_all_codes_of_integers(device: str) -> None:
    scales = torch.full((1,), 0.5, device=device)
    for format, codes in (
        ("int8", torch.arange(-128, 128).to(torch.int8)),
        ("int4", torch.arange(256).to(torch.uint8)),
    ):
        got = dequantize(codes.to(device), scales, format=format)
        plain = numbers(codes, (format, True), got.shape[-1])
        assert torch.equal(got.cpu().double(), plain * 0.5)
        codes = codes.view(torch.uint8)
        got = dequantize(codes.to(device), scales, scales * 6, format=format)
        plain = numbers(codes, (format, False), got.shape[-1])
        assert torch.equal(got.cpu().double(), plain * 0.5 + 3)
    levels = torch.arange(16, dtype=torch.uint8)
    got = dequantize(levels.to(device), scales * 2, format="nf4", length=31)[::2]
    assert torch.equal(got.cpu().double(), torch.tensor(NF4_LEVELS).double())


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_random_rounding_has_the_right_mean(kind: tuple[str, bool], device: str) -> None:
    """Over 2,000 seeds. Of a mean the deviation is at most 1 / 2 of a step divided by their root,
    and 6 of these are exceeded with 2e-9, so that the 64 elements raise one false alarm in 8e6.
    """
    x = values((1, 64), F32, device)
    options = options_of(kind, (None, None, 1))
    total, seeds = torch.zeros(1, 64, dtype=torch.float64), 2000
    for seed in range(seeds):
        total += fake_quantize(x, **options, seed=seed).cpu().double()
    scale = quantize(x, **options).scales.item()
    error = (total / seeds - x.cpu().double()).abs()
    assert (error <= 6 * 0.5 * scale / seeds**0.5).all()
    assert (error > 0).any()


def test_random_bits_differ_between_elements_and_seeds(device: str) -> None:
    x = torch.full((1, 4097), 0.5, device=device)
    x[0, 0] = 127  # the scale is 1: each element is halfway
    first, second, again = (quantize(x, seed=seed).codes[0, 1:] for seed in (0, -5, 0))
    assert torch.equal(first, again)
    for codes in (first, second):
        assert abs(codes.double().mean().item() - 0.5) < 0.05 and set(codes.tolist()) == {0, 1}
    agree = (first == second).double().mean().item()
    assert abs(agree - 0.5) < 0.05


@pytest.mark.parametrize("size", [64, 128])
def test_random_bits_differ_between_groups_and_rows(size: int, device: str) -> None:
    """Of equal numbers, each group rounds others up."""
    x = torch.full((8, 40 * size), 0.5, device=device)
    x[:, ::size] = 127
    codes = quantize(x, group_size=size, seed=3).codes.view(8 * 40, size)[:, 1:].double()
    assert (abs(codes.mean(0) - 0.5) < 0.2).all() and (abs(codes.mean(1) - 0.5) < 0.4).all()
    alike = (codes - 0.5) @ (codes - 0.5).t() / (size - 1)  # 1/4 with itself
    alike.fill_diagonal_(0)
    assert alike.abs().max() < 0.2


@pytest.mark.parametrize("bits_and_format", [(8, "int8"), (4, "int4")])
@pytest.mark.parametrize("asym", [False, True])
def test_ds_quantizer(asym: bool, bits_and_format: tuple[int, str], device: str) -> None:
    number, name = bits_and_format
    for dtype in DTYPES:
        x = values((6, 70), dtype, device)
        want = fake_quantize(x.view(4, 105), name, symmetric=not asym).view(6, 70)
        version, copy = x._version, x.clone()
        assert ds_quantizer(x, 4, number, asym=asym) is x and same(x, want)
        assert x._version > version
        torch.manual_seed(1)
        found = ds_quantizer(copy.clone(), 4, number, True, asym)
        torch.manual_seed(1)
        assert same(found, ds_quantizer(copy.clone(), 4, number, True, asym))
        assert not same(found, ds_quantizer(copy.clone(), 4, number, True, asym))
        torch.manual_seed(1)
        with torch.device("meta"):  # is for what is made meanwhile
            assert same(found, ds_quantizer(copy.clone(), 4, number, True, asym))
        apart = (found.double() - copy.double()).abs()
        assert (apart > 0).any()
    empty = torch.empty(0, device=device)
    assert ds_quantizer(empty, 3) is empty


def test_the_gradient_goes_straight_through(device: str) -> None:
    x = values((5, 33), F32, device).requires_grad_()
    out = fake_quantize(x, "int4", group_size=8)
    grad = make((5, 33), F32, 4, device)
    (got,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(got, grad)
    want = fake_quantize_ref(x.detach().cpu(), "int4", group_size=8)
    torch.testing.assert_close(out.detach().cpu().double(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"^quantize: the gradient of x is wanted"):
        quantize(x).scales.sum().backward()
