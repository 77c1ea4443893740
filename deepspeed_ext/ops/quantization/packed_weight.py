"""The quantized weight of a linear layer, in the order that kernels read it."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.quantization.formats import (
    FORMATS,
    NF4_LEVELS,
    groups_of,
    number_of,
    unpack_nibbles,
)
from deepspeed_ext.ops.quantization.repack_weight import repack_weight_

LINE_BYTES, RUN_BYTES = 128, 16  # see packed_weight.h


class PackedWeight(NamedTuple):
    """A weight of shape (n, length), of which csrc/quantization/packed_weight.h draws the order.

    Args:
        codes: (n, bytes of a row), uint8; rows are padded to multiples of 128 bytes.
        scales: (groups, n padded to a multiple of 4), float32.
        offsets: like scales, or None if the format is symmetric.
        format: "int8", "int4" or "nf4".
        group_size: elements along a row that share a scale.
        length: elements of a row.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    format: str
    group_size: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight that it stands for."""
        return self.codes.shape[0], self.length


def row_bytes(length: int, bits: int) -> int:
    """Return how many bytes a packed row takes."""
    return -(-length * bits // (8 * LINE_BYTES)) * LINE_BYTES


def pack_weight(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    format: str,
    group_size: int,
    length: int | None = None,
) -> PackedWeight:
    """Return what ``quantize`` has made of a weight in the order that kernels read.

    Args:
        codes: (n, length), int8, or uint8 if there are offsets; of formats with 4 bits (n, half the
            length, rounded up), uint8, on any device.
        scales: (n, groups), float32.
        offsets: like scales, or None.
        format: "int8", "int4" or "nf4".
        group_size: elements along a row that share a scale.
        length: elements of a row; None: two for each byte with 4 bits, one with 8.
    """
    check_kinds("pack_weight", codes=(codes, Tensor), scales=(scales, Tensor))
    if offsets is not None:
        check_kinds("pack_weight", offsets=(offsets, Tensor))
    bits = FORMATS[number_of("pack_weight", format)].bits
    if FORMATS[number_of("pack_weight", format)].float8 is not None:
        raise ValueError(f"pack_weight: format is {format!r}, expected int8, int4 or nf4")
    if length is None:
        length = codes.shape[-1] * 8 // bits if codes.dim() > 0 else 0
    _check(codes, scales, offsets, format, bits, group_size, length)
    pad = (0, 0, 0, -codes.shape[0] % 4)

    def by_groups(values: Tensor) -> Tensor:
        return F.pad(values.float(), pad).t().contiguous()

    lines = lines_of_bytes(codes, bits, length, format, offsets is not None)
    return PackedWeight(
        lines,
        by_groups(scales),
        None if offsets is None else by_groups(offsets),
        format,
        group_size,
        length,
    )


def _check(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    format: str,
    bits: int,
    group_size: int,
    length: int,
) -> None:
    dtype = torch.int8 if bits == 8 and offsets is None else torch.uint8
    if codes.dtype != dtype or codes.dim() != 2:
        raise ValueError(
            f"pack_weight: codes is {codes.dtype} with shape {list(codes.shape)},"
            f" expected {dtype} with two dimensions"
        )
    if codes.shape[1] != -(-length * bits // 8):
        raise ValueError(
            f"pack_weight: codes has shape {list(codes.shape)}, expected"
            f" {-(-length * bits // 8)} bytes in each row for length {length}"
        )
    if not isinstance(group_size, int) or not 0 < group_size <= max(length, 1):
        raise ValueError(
            f"pack_weight: group_size is {group_size}, expected 1 to {length}, the length"
        )
    shape = (codes.shape[0], groups_of(length, group_size))
    for name, given in (("scales", scales), ("offsets", offsets)):
        if given is None:
            continue
        if given.shape != shape:
            raise ValueError(
                f"pack_weight: {name} has shape {list(given.shape)}, expected {list(shape)}"
            )
        if given.device != codes.device:
            raise ValueError(f"pack_weight: {name} is on {given.device}, expected {codes.device}")
    if format == "nf4" and offsets is not None:
        raise ValueError("pack_weight: offsets is a tensor, expected None, as nf4 is symmetric")


def lines_of_bytes(codes: Tensor, bits: int, length: int, format: str, biased: bool) -> Tensor:
    """Return whole lines of each row, reordered."""
    n = codes.shape[0]
    if bits == 4:
        beyond = -codes.shape[1] % 4
        whole = F.pad(codes, (0, beyond)).contiguous()
        words = whole.reshape(-1).view(torch.int32).view(n, whole.shape[1] // 4)
        lines = codes.new_empty((n, row_bytes(length, bits)))
        repack_weight_(words, lines, format=format, length=length)
        return lines
    codes = (codes ^ 128 if biased else codes.view(torch.uint8)).contiguous()
    codes = F.pad(codes, (0, row_bytes(length, bits) - codes.shape[1]))
    # Element 8 p + 2 w + h of a run is number p of half h of word w.
    runs = codes.view(n, codes.shape[1] // RUN_BYTES, RUN_BYTES // 8, 4, 2).permute(0, 1, 3, 4, 2)
    return runs.reshape(codes.shape)


def signed_codes(weight: PackedWeight) -> Tensor:
    """Return the codes of a packed weight in their order: (n, length), as int8; of nf4, levels."""
    bits = FORMATS[number_of("signed_codes", weight.format)].bits
    of_run, n = RUN_BYTES * 8 // bits, weight.codes.shape[0]
    padded = weight.codes.shape[1] * 8 // bits
    values = weight.codes if bits == 8 else unpack_nibbles(weight.codes, padded)
    runs = values.view(n, padded // of_run, 4, 2, of_run // 8).permute(0, 1, 4, 2, 3)
    codes = runs.reshape(n, padded)[:, : weight.length].contiguous().view(torch.int8)
    return codes - 8 if weight.format == "int4" else codes


def _fake(codes: Tensor, scales: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
    return codes.new_empty(codes.shape[0], options["length"], dtype=DTYPES[options["dtype"]])


def libraries_of(bits: int) -> dict[str, str]:
    """Return for each device the op library for codes of so many bits."""
    return {"cpu": f"cpu_quantized_linear_w{bits}", "cuda": f"fused_quantized_linear_w{bits}"}


_OPS = {
    bits: define(
        f"unpack_weight.w{bits}(Tensor codes, Tensor scales, Tensor? offsets, *, int format,"
        " int group_size, int length, int dtype) -> Tensor",
        libraries_of(bits),
        fake=_fake,
    )
    for bits in (4, 8)
}


def unpack_weight(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the floats that a packed weight stands for, in one pass over it.

    Args:
        weight: what ``pack_weight`` returned.
        dtype: float32, bfloat16 or float16; what is worked out in float32 is rounded to it.

    Returns:
        (n, length), contiguous.
    """
    number = number_of("unpack_weight", weight.format)
    if dtype not in DTYPES:
        named = str(dtype).removeprefix("torch.")
        raise ValueError(f"unpack_weight: dtype is {named}, expected float32, bfloat16 or float16")
    out: Tensor = _OPS[FORMATS[number].bits](
        weight.codes,
        weight.scales,
        weight.offsets,
        format=number,
        group_size=weight.group_size,
        length=weight.length,
        dtype=DTYPES.index(dtype),
    )
    return out


def unpack_weight_ref(weight: PackedWeight) -> Tensor:
    """Do what unpack_weight does, in float64 and plain torch: its definition, for tests."""
    n, length = weight.shape
    codes = signed_codes(weight)
    if weight.format == "nf4":
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=codes.device)
        values = levels[codes.long()]
    else:
        values = codes.double()

    def spread(of_groups: Tensor) -> Tensor:
        each = of_groups[:, :n].t().double()
        return each.repeat_interleave(weight.group_size, 1)[:, :length]

    if weight.offsets is None:
        return values * spread(weight.scales)
    zero = 128 if weight.format == "int8" else 8
    return (values + zero) * spread(weight.scales) + spread(weight.offsets)
