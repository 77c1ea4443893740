"""Low-bit codes to the floats that they stand for."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.quantization.formats import FORMATS, NF4_LEVELS, number_of, unpack_nibbles
from deepspeed_ext.ops.quantization.quantize import LIBRARIES, group_numbers


def _fake(codes: Tensor, scales: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], options["length"], dtype=DTYPES[options["dtype"]])


_op = define(
    "dequantize(Tensor codes, Tensor scales, Tensor? offsets, *, int format, int? group_size,"
    " int? group_rows, int length, int dtype) -> Tensor",
    LIBRARIES,
    fake=_fake,
)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    format: str = "int8",
    group_size: int | None = None,
    group_rows: int | None = 1,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what codes of ``quantize`` stand for: the code's number times the scale of its group.

    It is worked out in float32, rounded once, with an offset too, and then rounded to the dtype.
    The bits are the same on the CPU, with any number of threads and any instruction set, and on
    CUDA. Codes that quantize never makes, such as -128, stand for what they say.

    Args:
        codes: (..., bytes of a row), on the CPU or on CUDA.
        scales: (..., groups), float32; of groups of several rows (groups of rows, groups).
        offsets: like scales, for codes that were made with `symmetric` False.
        format: as codes were made with.
        group_size: as codes were made with.
        group_rows: as codes were made with.
        length: elements of a row; None: two for each byte with 4 bits, one with 8.
        dtype: float32, bfloat16 or float16.

    Returns:
        (..., length), contiguous.

    Raises:
        RuntimeError: a gradient is wanted.

    See: csrc/quantization/formats.h; ``dequantize_ref`` is the same in float64.
    """
    check_kinds("dequantize", codes=(codes, Tensor))
    number = number_of("dequantize", format)
    if dtype not in DTYPES:
        raise ValueError(f"dequantize: dtype is {dtype}, expected float32, bfloat16 or float16")
    out: Tensor = _op(
        codes,
        scales,
        offsets,
        format=number,
        group_size=group_size,
        group_rows=group_rows,
        length=_length_of(codes, number) if length is None else length,
        dtype=DTYPES.index(dtype),
    )
    return out


def _length_of(codes: Tensor, number: int) -> int:
    return codes.shape[-1] * 8 // FORMATS[number].bits if codes.dim() else 0


def dequantize_ref(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    format: str = "int8",
    group_size: int | None = None,
    group_rows: int | None = 1,
    length: int | None = None,
) -> Tensor:
    """Do what dequantize does, in float64 and plain torch: its definition, for tests."""
    number = number_of("dequantize_ref", format)
    kind = FORMATS[number]
    length = _length_of(codes, number) if length is None else length
    group_size = max(length, 1) if group_size is None else group_size
    numbers = unpack_nibbles(codes, length) if kind.bits == 4 else codes
    if kind.name == "nf4":
        values = torch.tensor(NF4_LEVELS, dtype=torch.float64)[numbers.long()]
    else:
        values = numbers.double() - (8 if kind.name == "int4" and offsets is None else 0)
    groups = group_numbers(values.shape, length, group_size, group_rows)
    values = values * scales.double().flatten()[groups].view(values.shape)
    if offsets is None:
        return values
    return values + offsets.double().flatten()[groups].view(values.shape)
