"""A weight as tensors of few bits, a block of rows at a time, and how far these are from it."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops import dequantize, quantize
from deepspeed_ext.ops.quantization.formats import NF4_LEVELS, Format
from deepspeed_ext.ops.quantization.packed_weight import (
    PackedWeight,
    pack_weight,
    unpack_weight,
)
from deepspeed_ext.quantization.layout import WeightLayout

_BLOCK_ELEMENTS = 1 << 24  # what lies about as floats or bytes on the way is some of these


class Errors:
    """How far the codes of a weight are from it, kept on its device: nobody waits for it."""

    def __init__(self, layout: WeightLayout, device: torch.device) -> None:
        self._layout = layout
        self._count = layout.shape[0] * layout.shape[1]
        self._largest = torch.zeros((), device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, block: Tensor, floats: Tensor, scales: Tensor) -> None:
        """Take in rows.

        Args:
            block: (rows, length), as they were.
            floats: float32, what their codes stand for; overwritten.
            scales: (rows, groups).
        """
        if block.numel() == 0:
            return
        errors = floats.sub_(block)
        size, groups = self._layout.group_size, scales.shape[1]
        beyond = size * groups - errors.shape[1]
        padded = (F.pad(errors, (0, beyond)) if beyond else errors).view(-1, groups, size)
        self._squares += torch.linalg.vector_norm(padded, dim=-1).double().square().sum()
        largest = torch.linalg.vector_norm(padded, float("inf"), dim=-1)
        most = scales.float() * half_step(self._layout.of_format)
        self._largest = torch.maximum(self._largest, (largest / most).amax())

    def result(self) -> tuple[float, float]:
        """Return the largest error in parts of what the format allows, and the rms; waits."""
        return float(self._largest), float((self._squares / max(self._count, 1)).sqrt())


def half_step(format: Format) -> float:
    """Return half the widest step between codes next to each other, in parts of the scale.

    No element is rounded by more, but to fp8 those near the largest only.
    """
    if format.name == "nf4":
        return max(b - a for a, b in pairwise(NF4_LEVELS)) / 2
    if format.float8 is None:
        return 0.5
    return 2.0 ** int(math.log2(format.largest)) * torch.finfo(format.float8).eps / 2


def quantize_weight(
    weight: Tensor,
    layout: WeightLayout,
    errors: Errors | None = None,
    made: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that stand for a weight.

    Args:
        weight: (out, in), float32, bfloat16 or float16, of any strides.
        layout: without act_order.
        errors: where to note how far they are from it.
        made: these tensors, as ``layout.tensors_on`` returns them; None: of the weight's device.
    """
    made = layout.tensors_on(weight.device) if made is None else made
    rows = max(_BLOCK_ELEMENTS // max(layout.shape[1], 1), 1)
    rows = -(-rows // 4) * 4  # so that scales are padded for the last of them only
    for begin in range(0, layout.shape[0], rows):
        block = weight[begin : begin + rows]
        add = _add_float8 if layout.is_float8 else _add_packed
        add(made, begin, block, layout, errors)
    return made


def _add_packed(
    made: dict[str, Tensor], begin: int, block: Tensor, layout: WeightLayout, errors: Errors | None
) -> None:
    codes, scales, offsets = quantize(
        block, layout.format, group_size=layout.group_size, symmetric=layout.symmetric
    )
    packed = pack_weight(
        codes,
        scales,
        offsets,
        format=layout.format,
        group_size=layout.group_size,
        length=layout.shape[1],
    )
    made["codes"][begin : begin + len(block)] = packed.codes
    for name, values in (("scales", packed.scales), ("offsets", packed.offsets)):
        if values is not None:
            made[name][:, begin : begin + values.shape[1]] = values
    if errors is not None:
        errors.add(block, unpack_weight(packed), scales)


def _add_float8(
    made: dict[str, Tensor], begin: int, block: Tensor, layout: WeightLayout, errors: Errors | None
) -> None:
    codes, scales, _ = quantize(block, layout.format, group_size=layout.group_size)
    made["codes"][begin : begin + len(block), : layout.shape[1]] = codes.view(torch.uint8)
    made["scales"][: scales.shape[1], begin : begin + len(block)] = scales.t()
    if errors is not None:
        errors.add(
            block,
            dequantize(
                codes,
                scales,
                format=layout.format,
                group_size=layout.group_size,
                dtype=torch.float32,
            ),
            scales,
        )


def dequantize_tensors(
    layout: WeightLayout, tensors: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the weight that tensors stand for, its columns in the order of x.

    Args:
        layout: of the tensors.
        tensors: as `quantize_weight` returns them.
        dtype: float32, bfloat16 or float16.
    """
    n, length = layout.shape
    if layout.is_float8:
        codes = tensors["codes"][:n, :length].view(layout.code_dtype)
        floats: Tensor = dequantize(
            codes,
            tensors["scales"][0, :n, None],
            format=layout.format,
            group_size=layout.group_size,
            dtype=dtype,
        )
    else:
        floats = unpack_weight(packed(layout, tensors), dtype)
    if layout.act_order:
        floats = torch.empty_like(floats).index_copy_(1, tensors["order"], floats)
    return floats


def packed(layout: WeightLayout, tensors: dict[str, Tensor]) -> PackedWeight:
    """Return the tensors as ops take them."""
    return PackedWeight(
        tensors["codes"],
        tensors["scales"],
        tensors.get("offsets"),
        layout.format,
        layout.group_size,
        layout.shape[1],
    )
