"""Floats to low-bit codes, with a scale for each group."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.quantization.formats import (
    FORMATS,
    LEAST_SCALE,
    MOST_SCALED,
    NF4_LEVELS,
    Format,
    groups_of,
    number_of,
    pack_nibbles,
)

LIBRARIES = {"cpu": "cpu_quantizer", "cuda": "fused_quantizer"}


class Quantized(NamedTuple):
    """What quantize returns.

    Args:
        codes: as csrc/quantization/formats.h draws them: (..., k), int8, uint8 with offsets, or a
            float8 dtype; of formats with 4 bits (..., half of k, rounded up), uint8.
        scales: (..., groups), float32; of groups of several rows (groups of rows, groups).
        offsets: like scales, or None if the format is symmetric.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


def shape_of_scales(
    shape: torch.Size, length: int, group_size: int | None, group_rows: int | None
) -> tuple[int, ...]:
    """Return the shape of the scales of rows of this length; of `shape` all but the last counts."""
    groups = groups_of(length, length if group_size is None else group_size)
    if group_rows == 1:
        return (*shape[:-1], groups)
    rows = shape[:-1].numel()
    of_group = max(rows, 1) if group_rows is None else group_rows
    return -(-rows // of_group), groups


def seed_of(op: str, seed: int | None) -> int | None:
    """Return a seed as the ops take it, who see its 64 bits: one from 2^63 on becomes negative."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"{op}: seed is {seed!r}, expected a whole number, -2**63 to 2**64 - 1")
    return seed - 2**64 if seed >= 2**63 else seed


def _fake(x: Tensor, *, seed: int | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    format, symmetric = FORMATS[options["format"]], options["symmetric"]
    k = x.shape[-1]
    width = -(-k // 2) if format.bits == 4 else k
    codes = x.new_empty(*x.shape[:-1], width, dtype=format.code_dtype(symmetric))
    shape = shape_of_scales(x.shape, k, options["group_size"], options["group_rows"])
    scales = x.new_empty(shape, dtype=torch.float32)
    offsets = x.new_empty((0,) if symmetric else shape, dtype=torch.float32)
    return codes, scales, offsets


_op = define(
    "quantize(Tensor x, *, int format, bool symmetric, int? group_size, int? group_rows,"
    " SymInt? seed) -> (Tensor codes, Tensor scales, Tensor offsets)",
    LIBRARIES,
    fake=_fake,
)


def quantize(
    x: Tensor,
    format: str = "int8",
    *,
    group_size: int | None = None,
    group_rows: int | None = 1,
    symmetric: bool = True,
    seed: int | None = None,
) -> Quantized:
    """Return low-bit codes for a tensor, and a scale for each group of its elements.

    The bits are the same on the CPU, with any number of threads and any instruction set, and on
    CUDA. A code stands for the number that is nearest to x: of integer formats, c times the scale
    is at most half of the scale away from x, exactly; with an offset, (1/2 + 2^-16) of it. With a
    seed it is less than (1 + 2^-16) of the scale away, without an offset less than the scale, and
    its expected value is that of x to 2^-22 of the scale. Groups with an element that is not finite
    have the scale NaN.

    Args:
        x: (..., k), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one piece
            each, at equal distances, are read as they lie; other layouts are copied first.
        format: "int8", "int4", "nf4", "fp8_e4m3" or "fp8_e5m2".
        group_size: elements along a row that share a scale, 1 to k; the last group may be shorter.
            None: the whole row.
        group_rows: rows that share a scale; then x is seen as one matrix of all its rows. None: all
            of them.
        symmetric: False: with an offset, the least element of a group; "int8" and "int4" only.
        seed: None: to the nearest. A whole number of 64 bits, with a sign or without: to one of two
            neighbours, at random; the random bits of an element depend on the seed and on its index
            in x modulo 2^32. "int8" and "int4" only.

    Returns:
        Codes, scales and offsets.

    Raises:
        RuntimeError: a gradient is wanted; ``fake_quantize`` has one.

    See: csrc/quantization/formats.h; ``quantize_ref`` is the same in float64.
    """
    codes, scales, offsets = _op(
        x,
        format=number_of("quantize", format),
        symmetric=symmetric,
        group_size=group_size,
        group_rows=group_rows,
        seed=seed_of("quantize", seed),
    )
    return Quantized(codes, scales, None if symmetric else offsets)


def quantize_ref(
    x: Tensor,
    format: str = "int8",
    *,
    group_size: int | None = None,
    group_rows: int | None = 1,
    symmetric: bool = True,
) -> Quantized:
    """Do what quantize does without a seed, in float64 and plain torch: its definition, for tests.

    Scales and offsets are rounded to float32, and codes are those of the scales that are returned.
    Halfway between two codes quantize may choose the other one.
    """
    kind, length = FORMATS[number_of("quantize_ref", format)], x.shape[-1]
    group_size = max(length, 1) if group_size is None else group_size
    shape = shape_of_scales(x.shape, length, group_size, group_rows)
    groups = group_numbers(x.shape, length, group_size, group_rows)
    values = x.double().flatten()

    def most(of_elements: Tensor) -> Tensor:  # of each group
        none = values.new_full((math.prod(shape),), -torch.inf)
        return none.scatter_reduce(0, groups, of_elements, "amax")

    finite = ~most((~values.isfinite()).double()).gt(0)
    known = values.nan_to_num(0, 0, 0)
    if symmetric:
        largest, offsets = most(known.abs()), None
        scales = (largest.clamp_max(MOST_SCALED) / kind.largest).clamp_min(LEAST_SCALE).float()
    else:
        offsets = -most(-known)
        half = (
            most(known).clamp_max(MOST_SCALED) / 2 - offsets / 2
        ).float().double() / kind.asymmetric_largest
        scales = 2 * half.float().clamp_min(LEAST_SCALE / 2)
        offsets = offsets.where(finite, 0).float()
    positions = known if offsets is None else known - offsets.double()[groups]
    codes = _nearest(kind, positions, scales[groups], symmetric)
    bytes = torch.where(finite[groups], codes.view(torch.uint8), 0).view(x.shape)
    packed = pack_nibbles(bytes) if kind.bits == 4 else bytes
    return Quantized(
        packed.view(kind.code_dtype(symmetric)),
        scales.where(finite, torch.nan).view(shape),
        None if offsets is None else offsets.view(shape),
    )


def _nearest(kind: Format, positions: Tensor, scales: Tensor, symmetric: bool) -> Tensor:
    """Return the codes of positions, unsigned or as bytes."""
    if kind.float8 is not None:
        return (positions.float() * scales.reciprocal()).to(kind.float8)
    if kind.name == "nf4":
        levels = positions.new_tensor(NF4_LEVELS)
        quotients = (positions / scales.double()).clamp(-1, 1)
        return torch.bucketize(quotients, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    numbers = (positions / scales.double()).round()
    if symmetric and kind.bits == 8:
        return numbers.to(torch.int8)
    return (numbers + (8 if symmetric else 0)).to(torch.uint8)


def group_numbers(
    shape: torch.Size, length: int, group_size: int, group_rows: int | None
) -> Tensor:
    """Return the number of the group that each element of such a tensor is in, flat."""
    rows = shape[:-1].numel()
    of_group = max(rows, 1) if group_rows is None else group_rows
    columns = torch.arange(length) // group_size
    bands = torch.arange(rows) // of_group
    return (bands[:, None] * groups_of(length, group_size) + columns).flatten()
