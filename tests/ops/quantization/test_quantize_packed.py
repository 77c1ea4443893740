"""quantize_packed_: the bits of pack_weight(quantize()), its errors, and what it refuses."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quantize_cases import bits, same, values
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F32
from torch import Tensor

from deepspeed_ext.ops import (
    PackedWeight,
    pack_weight,
    quantize,
    quantize_packed_,
    quantize_packed_ref_,
)
from deepspeed_ext.ops.quantization.formats import FORMATS, NAMES, groups_of
from deepspeed_ext.ops.quantization.packed_weight import row_bytes, unpack_weight_ref

OPS = torch.ops.deepspeed_ext
KINDS = [("int8", True), ("int8", False), ("int4", True), ("int4", False), ("nf4", True)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GROUPS = (1, 7, 16, 31, 32, 33, 48, 64, 96, 128, 512, 1024, 2048, 4096, None)  # None: the row
LENGTHS = (0, 1, 31, 32, 33, 64, 255, 256, 384, 1024, 4096, 4128, 5000)
ROWS = (1, 5, 130, 4, 3, 0)
Kind = tuple[str, bool]


def cases() -> Iterator[tuple[int, int, int]]:
    """Rows, length and group_size: around the widths of vectors, warps, blocks and lines."""
    for length in LENGTHS:
        fitting = [group for group in GROUPS if group is None or group < max(length, 1)]
        for number, group in enumerate(fitting):
            yield ROWS[(number + length) % len(ROWS)], length, group or max(length, 1)
    yield from ((2, 40_000, 128), (2, 40_000, 40_000), (3, 40_007, 12_001), (1, 70_000, 64))


def place_for(shape: tuple[int, int], kind: Kind, group: int, device: str = "cpu") -> PackedWeight:
    """Return where to write, full of other numbers; groups are further apart than they are long."""
    (n, length), (format, symmetric) = shape, kind

    def of_groups() -> Tensor:
        room = torch.full((groups_of(length, group), 8 + -(-n // 4) * 4), 7.0, device=device)
        return room[:, 4:-4]

    of_row = row_bytes(length, FORMATS[NAMES.index(format)].bits)
    codes = torch.full((n, of_row), 99, dtype=torch.uint8, device=device)
    offsets = None if symmetric else of_groups()
    return PackedWeight(codes, of_groups(), offsets, format, group, length)


def errors_for(n: int, device: str = "cpu") -> Tensor:
    return torch.full((n, 2), 7.0, dtype=torch.float64, device=device)


def in_steps(x: Tensor, kind: Kind, group: int) -> PackedWeight:
    made = quantize(x, kind[0], group_size=group, symmetric=kind[1])
    return pack_weight(*made, format=kind[0], group_size=group, length=x.shape[1])


def check_same(got: PackedWeight, want: PackedWeight, what: object = "") -> None:
    for one, other in zip(got[:3], want[:3], strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or same(one, other), what


def made_of(x: Tensor, kind: Kind, group: int) -> tuple[PackedWeight, Tensor]:
    weight = place_for((x.shape[0], x.shape[1]), kind, group, str(x.device))
    errors = errors_for(len(x), str(x.device))
    quantize_packed_(x, weight, errors)
    return weight, errors


@each_dtype
@each_kind
def test_has_the_bits_of_two_steps(kind: Kind, dtype: torch.dtype, device: str) -> None:
    for n, length, group in cases():
        x = values((n, length), dtype, device)
        weight, _ = made_of(x, kind, group)
        check_same(weight, in_steps(x, kind, group), (n, length, group))
        for tensor in (weight.scales, weight.offsets):
            if tensor is not None and tensor._base is not None and tensor.numel() > 0:
                around = tensor._base.clone()
                around[:, 4:-4] = 7
                assert bool((around == 7).all()), "wrote beside the scales"


@each_dtype
@each_kind
def test_as_the_reference(kind: Kind, dtype: torch.dtype) -> None:
    """But for codes halfway between two."""
    for n, length, group in ((5, 33, 7), (6, 256, 64), (3, 300, 300), (0, 8, 8), (4, 0, 1)):
        x = values((n, length), dtype)
        weight, errors = made_of(x, kind, group)
        want, of_rows = place_for((n, length), kind, group), errors_for(n)
        quantize_packed_ref_(x, want, of_rows)
        assert same(weight.scales, want.scales)
        off = (unpack_weight_ref(weight) - unpack_weight_ref(want)).abs()
        step = want.scales[:, :n].t().repeat_interleave(group, 1)[:, :length]
        assert bool(((off == 0) | ((off - step).abs() <= step * 2**-12)).all())
        assert float((off > 0).double().sum()) <= 0.01 * off.numel()
        torch.testing.assert_close(errors, of_rows, rtol=2**-12, atol=2**-12)


@each_kind
def test_layouts(kind: Kind, device: str) -> None:
    for name, change in LAYOUTS.items():
        x = change(values((48, 200), F32, device))
        if x.dim() != 2:
            continue
        for group in (8, 16, 32, x.shape[1]):
            weight, errors = made_of(x, kind, group)
            check_same(weight, in_steps(x.contiguous(), kind, group), name)
            assert torch.equal(errors, made_of(x.contiguous(), kind, group)[1]) or device == "cuda"


@each_dtype
@each_kind
def test_any_address(kind: Kind, dtype: torch.dtype, device: str) -> None:
    """Of floats and of codes."""
    x = values((9, 256), dtype, device)
    for group in (32, 64, 100, 256):
        want = in_steps(x, kind, group)
        moved = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(9, 256).copy_(x)
        check_same(made_of(moved, kind, group)[0], want)
        weight = place_for((9, 256), kind, group, device)
        room = torch.full((weight.codes.numel() + 16,), 99, dtype=torch.uint8, device=device)
        codes = room[3 : 3 + weight.codes.numel()].view(weight.codes.shape)
        quantize_packed_(x, weight._replace(codes=codes))
        check_same(weight._replace(codes=codes), want)
        assert bool((room[:3] == 99).all()) and bool((room[3 + codes.numel() :] == 99).all())


@each_dtype
@each_kind
def test_errors_are_those_of_the_elements(kind: Kind, dtype: torch.dtype, device: str) -> None:
    """In float64. Without offsets what is left of an element is exact, and rounded once as it is
    divided by a rounded scale; with offsets x less the offset is rounded, at `levels` of the scale.
    Squares are added up 32 in a row at most, in float32.
    """
    unit = 2.0**-24
    levels = 0 if kind[1] else 256 if kind[0] == "int8" else 16
    for n, length, group in ((5, 33, 7), (4, 256, 64), (130, 4096, 128), (3, 5000, 96), (2, 9, 9)):
        x = values((n, length), dtype, device).nan_to_num()
        weight, errors = made_of(x, kind, group)
        scales = weight.scales[:, :n].t().double().repeat_interleave(group, 1)[:, :length]
        off = (x.double() - unpack_weight_ref(weight)).abs()
        largest = (off / scales).amax(1)
        slack = scales * (levels * unit + 2.0**-70)
        assert bool(((errors[:, 0] - largest).abs() <= 4 * unit * largest + levels * unit).all())
        squares, of_slack = off.square().sum(1), (2 * off * slack + slack.square()).sum(1)
        bound = 40 * unit * squares + 1.01 * of_slack
        assert bool(((errors[:, 1] - squares).abs() <= bound).all())
        assert bool((errors[:, 1] > 0).all())


@each_kind
def test_errors_of_constants_are_none(kind: Kind, device: str) -> None:
    """Nor of the smallest numbers is one above what its format allows."""
    for value in (0.0, -0.0):
        _, errors = made_of(torch.full((3, 100), value, device=device), kind, 32)
        assert bool((errors == 0).all())
    _, errors = made_of(torch.tensor([[1e-45, -1e-45, 0.0, 1e-44] * 9], device=device), kind, 16)
    assert bool(errors.isfinite().all()) and float(errors[0, 0]) <= 0.5


@each_kind
def test_what_is_not_finite_is_nan_alone(kind: Kind, device: str) -> None:
    for dtype in DTYPES:
        for length, group in ((160, 32), (160, 20), (161, 40), (160, 160)):
            x = values((6, length), dtype, device)
            want = made_of(x, kind, group)[1]
            for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
                x[row, 32 * row + 5] = value
            if dtype == F32:  # a NaN with bits that would be a code
                x[0, 5:6].view(torch.int32).fill_(0x7FC12345)
            weight, errors = made_of(x, kind, group)
            check_same(weight, in_steps(x, kind, group))
            assert bool(errors[:4].isnan().all()) and torch.equal(errors[4:], want[4:])


@each_kind
def test_without_errors(kind: Kind, device: str) -> None:
    for length, group in ((256, 128), (100, 30)):
        x = values((6, length), BF16, device)
        weight = place_for((6, length), kind, group, device)
        quantize_packed_(x, weight)
        check_same(weight, in_steps(x, kind, group))


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results, of errors too."""
    found = hashlib.sha256()
    for number, (n, length, group) in enumerate(cases()):
        for kind in KINDS if length < 10_000 else KINDS[:1]:
            weight, errors = made_of(
                values((min(n, 40), length), DTYPES[number % 3], device), kind, group
            )
            for tensor in (*weight[:3], errors):
                if tensor is not None:
                    found.update(bits(tensor).numpy().tobytes())
    return found.hexdigest()


@each_dtype
@each_kind
def test_cuda_has_the_bits_of_the_cpu(kind: Kind, dtype: torch.dtype, cuda: str) -> None:
    """And the same largest error; squares are added up in another order."""
    for n, length, group in cases():
        x = values((n, length), dtype)
        if x.numel() > 20:
            x.view(-1)[7] = torch.nan
        want, of_rows = made_of(x, kind, group)
        got, errors = made_of(x.to(cuda), kind, group)
        check_same(got, want)
        assert same(errors[:, 0].cpu(), of_rows[:, 0])
        torch.testing.assert_close(
            errors[:, 1].cpu(), of_rows[:, 1], rtol=2**-15, atol=0, equal_nan=True
        )


@each_kind
def test_graphs_and_streams_of_cuda(kind: Kind, cuda: str) -> None:
    """Replayed with other values; waits for nothing but the stream, and takes no memory."""
    for length, group in ((1024, 128), (1000, 96), (4096, 4096)):
        x, other = (values((40, length), BF16, cuda, seed) for seed in (0, 9))
        want, of_rows = made_of(other, kind, group)
        weight, errors = made_of(x, kind, group)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.set_sync_debug_mode("error")
        try:
            quantize_packed_(x, weight, errors)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            with torch.cuda.graph(graph, stream=stream):
                quantize_packed_(x, weight, errors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        check_same(weight, want)
        assert torch.equal(errors, of_rows)


def options_of(kind: Kind, group: int) -> dict[str, Any]:
    return dict(format=NAMES.index(kind[0]), group_size=group)


@each_kind
def test_opcheck(kind: Kind, device: str) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"]
    x = values((5, 40), F32, device)
    for errors in (None, errors_for(5, device)):
        weight = in_steps(x, kind, 8)
        arguments = (x, *weight[:3], errors)
        checked = torch.library.opcheck(
            OPS.quantize_packed_.default, arguments, options_of(kind, 8), test_utils=checks
        )
        assert set(checked.values()) == {"SUCCESS"}


@each_kind
def test_compiled(kind: Kind, device: str) -> None:
    """In one graph, which writes what the op does."""
    torch.compiler.reset()

    def block(x: Tensor) -> tuple[Tensor, ...]:
        weight = place_for((x.shape[0], x.shape[1]), kind, 8, device)
        codes, errors = weight.codes, errors_for(x.shape[0], device)
        scales = weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        quantize_packed_(x * 2, weight._replace(scales=scales, offsets=offsets), errors)
        return codes + 1, scales * 2, errors

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for shape in ((5, 24), (3, 32)):
        x = values(shape, F32, device)
        for got, want in zip(compiled(x), block(x), strict=True):
            assert torch.equal(got, want)


def test_versions_go_up() -> None:
    weight, errors = place_for((4, 8), ("int8", False), 8), errors_for(4)
    written = [tensor for tensor in (*weight[:3], errors) if tensor is not None]
    before = [tensor._version for tensor in written]
    quantize_packed_(torch.ones(4, 8), weight, errors)
    assert [tensor._version for tensor in written] == [version + 1 for version in before]


X = torch.ones(6, 40)
INT8, INT4, NF4, LIFTED = (
    place_for((6, 40), kind, 16) for kind in (KINDS[0], KINDS[2], KINDS[4], KINDS[1])
)
E = errors_for(6)
META = torch.ones(6, 128, dtype=torch.uint8, device="meta")
REFUSED: dict[str, Callable[[], object]] = {
    "x has shape [40], expected two dimensions": lambda: quantize_packed_(X[0], INT8),
    "x has shape [2, 3, 40], expected two dimensions":
        lambda: quantize_packed_(X.view(2, 3, 40), INT8),
    "x is float64, expected float32, bfloat16 or float16":
        lambda: quantize_packed_(X.double(), INT8),
    "format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2":
        lambda: quantize_packed_(X, INT8._replace(format="int3")),
    "format is 3, expected 0, 1 or 2, which are int8, int4 and nf4":
        lambda: quantize_packed_(X, INT8._replace(format="fp8_e4m3")),
    "format is -1, expected 0, 1 or 2, which are int8, int4 and nf4":
        lambda: OPS.quantize_packed_(X, *INT8[:3], None, format=-1, group_size=16),
    "group_size is 0, expected 1 to 40, the length of a row":
        lambda: quantize_packed_(X, INT8._replace(group_size=0)),
    "group_size is 41, expected 1 to 40, the length of a row":
        lambda: quantize_packed_(X, INT8._replace(group_size=41)),
    "offsets is a tensor, expected None, as nf4 is symmetric":
        lambda: quantize_packed_(X, NF4._replace(offsets=NF4.scales.clone())),
    "codes is int8, expected uint8":
        lambda: quantize_packed_(X, INT8._replace(codes=INT8.codes.char())),
    "codes has shape [5, 128], expected [6, 128]":
        lambda: quantize_packed_(X, INT8._replace(codes=INT8.codes[:5])),
    "codes has shape [6, 128], expected [6, 256]":
        lambda: OPS.quantize_packed_(torch.ones(6, 129), *INT8[:3], None, format=0, group_size=16),
    "x has shape [6, 48], expected [6, 40]": lambda: quantize_packed_(torch.ones(6, 48), INT8),
    "x has shape [6, 39], expected [6, 40]": lambda: quantize_packed_(X[:, :39], INT8),
    "x has 2147483648 rows, expected at most 2147483647":
        lambda: quantize_packed_(torch.empty(2**31, 0), INT8._replace(length=0)),
    "codes has strides [1, 6] for shape [6, 128], expected a contiguous tensor":
        lambda: quantize_packed_(X, INT8._replace(codes=INT8.codes.t().contiguous().t())),
    "codes is on meta, expected cpu": lambda: quantize_packed_(X, INT8._replace(codes=META)),
    "scales is float64, expected float32":
        lambda: quantize_packed_(X, INT8._replace(scales=INT8.scales.double())),
    "scales has shape [3, 6], expected [3, 8]":
        lambda: quantize_packed_(X, INT8._replace(scales=INT8.scales[:, :6])),
    "scales has shape [3, 8], expected [5, 8]":
        lambda: quantize_packed_(X, INT8._replace(group_size=8)),
    "scales has strides [1, 3] for shape [3, 8], expected groups one after the other, each"
    " contiguous":
        lambda: quantize_packed_(X, INT8._replace(scales=INT8.scales.t().contiguous().t())),
    "scales has strides [0, 1] for shape [3, 8], expected groups one after the other, each"
    " contiguous":
        lambda: quantize_packed_(X, INT8._replace(scales=INT8.scales[:1].expand(3, 8))),
    "offsets has shape [8], expected [3, 8]":
        lambda: quantize_packed_(X, LIFTED._replace(offsets=LIFTED.scales[0].clone())),
    "offsets has strides [8, 1], expected [16, 1]":
        lambda: quantize_packed_(X, LIFTED._replace(offsets=LIFTED.scales.contiguous())),
    "errors is float32, expected float64": lambda: quantize_packed_(X, INT8, E.float()),
    "errors has shape [5, 2], expected [6, 2]": lambda: quantize_packed_(X, INT8, E[:5]),
    "errors has strides [1, 6] for shape [6, 2], expected a contiguous tensor":
        lambda: quantize_packed_(X, INT8, E.t().contiguous().t()),
    "offsets is overlapping scales, expected separate memory":
        lambda: quantize_packed_(X, LIFTED._replace(offsets=LIFTED.scales)),
    "codes is overlapping x, expected separate memory":
        lambda: quantize_packed_(X, INT8._replace(codes=X.view(torch.uint8).view(-1)[100:868]
                                                  .view(6, 128))),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    quantize_packed_(X, INT8)  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=rf"^quantize_packed_: {re.escape(text)}$"):
        REFUSED[text]()


def test_refuses_other_devices(cuda: str) -> None:
    quantize_packed_(X.to(cuda), place_for((6, 40), KINDS[0], 16, cuda))
    for name in ("codes", "scales"):
        there = place_for((6, 40), KINDS[0], 16, cuda)
        here = there._replace(**{name: getattr(there, name).cpu()})
        with pytest.raises(ValueError, match=rf"^quantize_packed_: {name} is on cpu, expected cud"):
            quantize_packed_(X.to(cuda), here)


def test_freed_memory_is_refused() -> None:
    x = torch.ones(6, 40)
    x.untyped_storage().resize_(0)
    text = r"^quantize_packed_: x has no memory, expected 240 elements$"
    with pytest.raises(ValueError, match=text):
        quantize_packed_(x, INT8)


def test_what_is_refused_changes_nothing() -> None:
    weight = place_for((6, 40), KINDS[1], 16)
    with pytest.raises(ValueError, match=r"^quantize_packed_: errors has shape"):
        quantize_packed_(X, weight, E[:5])
    assert bool((weight.codes == 99).all()) and bool((weight.scales == 7).all())
