"""What the tests of quantize and its kin share: formats, layouts of groups, inputs, comparisons."""

from typing import Any

import torch
from samples import make
from torch import Tensor

from deepspeed_ext.ops import dequantize, fake_quantize, quantize, quantize_ref
from deepspeed_ext.ops.quantization.formats import FORMATS, NAMES, unpack_nibbles

KINDS = [  # format, symmetric
    *(("int8", True), ("int8", False), ("int4", True), ("int4", False)),
    *(("nf4", True), ("fp8_e4m3", True), ("fp8_e5m2", True)),
]
INTEGERS = KINDS[:4]
# Shape, group_size, group_rows: around every width of vectors, teams and units, aligned and not.
CASES: list[tuple[tuple[int, ...], int | None, int | None]] = [
    ((7,), None, 1),
    ((3, 1), 1, 1),
    ((2, 0), None, 1),
    ((0, 5), 2, 1),
    ((13, 101), 7, 1),
    ((13, 101), None, None),
    ((5, 33), 5, 2),
    ((2, 3, 64), 32, 1),
    ((4, 256), 128, 1),
    ((4, 1000), 96, 1),
    ((3, 1040), 16, 1),
    ((260, 272), 128, 128),
    ((2, 4096), None, 1),
    ((1, 9000), 4097, 1),
    ((2, 33_000), None, 1),
    ((1, 140_000), 70_001, None),
]


def options_of(kind: tuple[str, bool], case: tuple[Any, ...]) -> dict[str, Any]:
    return dict(format=kind[0], symmetric=kind[1], group_size=case[1], group_rows=case[2])


def values(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Tensor:
    """Of rows that differ by many binades, with zeros among them."""
    x = make(shape, torch.float32, seed)
    if x.dim() > 1:
        x *= torch.exp2(make((*shape[:-1], 1), torch.float32, seed + 1) * 6)
    x[make(shape, torch.float32, seed + 2) > 1.5] = 0
    return x.to(device, dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, all NaN alike."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = tensor.where(~tensor.isnan(), torch.nan)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def same(got: Tensor, want: Tensor) -> bool:
    return (
        got.shape == want.shape and got.dtype == want.dtype and torch.equal(bits(got), bits(want))
    )


def spread(of_groups: Tensor, x: Tensor, case: tuple[Any, ...]) -> Tensor:
    """Return for each element of x what belongs to its group, in float64."""
    rows, k = x.shape[:-1].numel(), x.shape[-1]
    group, group_rows = case[1] or max(k, 1), case[2] or max(rows, 1)
    flat = of_groups.cpu().double().reshape(-(-rows // group_rows), -1)
    found = flat[torch.arange(rows) // group_rows][:, torch.arange(k) // group]
    return found.view(x.shape)


def numbers(codes: Tensor, kind: tuple[str, bool], length: int) -> Tensor:
    """Return the codes of an integer format as the numbers that they stand for."""
    codes = codes.cpu()
    if kind[0] == "int4":
        return unpack_nibbles(codes, length).double() - (8 if kind[1] else 0)
    return codes.double()


def round_trip(x: Tensor, options: dict[str, Any], dtype: torch.dtype, **more: Any) -> Tensor:
    """Quantize and dequantize, and check that fake_quantize does the same."""
    made = quantize(x, **options, **more)
    others = {name: options[name] for name in ("format", "group_size", "group_rows")}
    found = dequantize(*made, **others, length=x.shape[-1], dtype=dtype)
    fake = fake_quantize(x, **options, **more)
    assert same(fake, found.to(x.dtype) if dtype == torch.float32 else found)
    return found


def assert_as_reference(x: Tensor, kind: tuple[str, bool], case: tuple[Any, ...]) -> None:
    """Scales and offsets have the bits of the reference; codes too, but halfway between two."""
    options = options_of(kind, case)
    got, want = quantize(x, **options), quantize_ref(x.cpu(), **options)
    assert same(got.scales, want.scales)
    assert (got.offsets is None) == (want.offsets is None)
    if got.offsets is not None and want.offsets is not None:
        assert torch.equal(got.offsets.cpu(), want.offsets)
    assert (got.codes.shape, got.codes.dtype) == (want.codes.shape, want.codes.dtype)
    if same(got.codes, want.codes):
        return
    assert FORMATS[NAMES.index(kind[0])].float8 is None and kind[0] != "nf4"
    found, expected = (numbers(each.codes, kind, x.shape[-1]) for each in (got, want))
    position = x.cpu().double()
    if want.offsets is not None:
        position = position - spread(want.offsets, x, case)
    quotient = position / spread(want.scales, x, case)
    apart = found != expected
    assert ((found - expected).abs()[apart] == 1).all()
    assert (((found + expected) / 2 - quotient).abs()[apart] <= 2**-15).all()
