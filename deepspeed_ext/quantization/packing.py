"""A weight as low-bit tensors, and how far these are from it."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops import dequantize, quantize, quantize_packed_
from deepspeed_ext.ops.quantization.formats import NF4_LEVELS, Format
from deepspeed_ext.ops.quantization.packed_weight import PackedWeight, unpack_weight
from deepspeed_ext.quantization.layout import WeightLayout

_BLOCK_ELEMENTS = 1 << 24  # what lies about as floats or bytes on the way is some of these


class Errors:
    """How far the codes of a weight are from it, kept on its device: nobody waits for it.

    Args:
        layout: of the weight.
        device: likewise.

    Attributes:
        rows: (out, 2), float64, of each row what ``quantize_packed_`` tells.
    """

    def __init__(self, layout: WeightLayout, device: torch.device) -> None:
        self.layout = layout
        self.rows = torch.empty(layout.shape[0], 2, dtype=torch.float64, device=device)

    def note(self, begin: int, block: Tensor, floats: Tensor, scales: Tensor) -> None:
        """Take in rows from number `begin` on.

        Args:
            begin: of the rows.
            block: (rows, length), as they were.
            floats: float32, what their codes stand for; overwritten.
            scales: (rows, groups).
        """
        if block.numel() == 0:
            return
        errors = floats.sub_(block)
        size, groups = self.layout.group_size, scales.shape[1]
        beyond = size * groups - errors.shape[1]
        padded = (F.pad(errors, (0, beyond)) if beyond else errors).view(-1, groups, size)
        largest = torch.linalg.vector_norm(padded, float("inf"), dim=-1)
        squares = torch.linalg.vector_norm(padded, dim=-1).double().square()
        of_rows = self.rows[begin : begin + len(block)]
        of_rows[:, 0] = (largest / scales).amax(1)
        of_rows[:, 1] = squares.sum(1)


def results_of(errors: Sequence[Errors]) -> list[tuple[float, float]]:
    """Return of each weight its largest error in parts of what the format allows, and the rms.

    Waits for each device once.
    """
    alike: defaultdict[tuple[torch.device, int], list[int]] = defaultdict(list)
    for i, each in enumerate(errors):
        if math.prod(each.layout.shape) > 0:
            alike[each.rows.device, len(each.rows)].append(i)
    totals: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    order: defaultdict[torch.device, list[int]] = defaultdict(list)
    for (device, _), indices in alike.items():
        rows = torch.stack([errors[i].rows for i in indices])
        totals[device].append(torch.stack((rows[..., 0].amax(1), rows[..., 1].sum(1)), 1))
        order[device] += indices
    found = [(0.0, 0.0)] * len(errors)
    for device, parts in totals.items():
        for i, (largest, squares) in zip(order[device], torch.cat(parts).tolist(), strict=True):
            layout = errors[i].layout
            rms = math.sqrt(squares / math.prod(layout.shape))
            found[i] = largest / half_step(layout.of_format), rms
    return found


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
    n, length = layout.shape
    weight = weight.detach()  # codes have no gradient, and need none
    if made is None:
        made = (layout.tensors_on if layout.is_float8 else layout.empty_on)(weight.device)
    if not layout.is_float8 and (length <= 1 or weight.stride(1) == 1):  # read as it lies
        of_rows = None if errors is None else errors.rows
        quantize_packed_(weight, packed(layout, made), of_rows)
        return made
    rows = max(_BLOCK_ELEMENTS // max(length, 1), 1)
    rows = -(-rows // 4) * 4  # so that scales are padded for the last of them only
    quantize_rows = _quantize_float8 if layout.is_float8 else _quantize_packed
    for begin in range(0, n, rows):
        quantize_rows(weight, made, layout, errors, slice(begin, min(begin + rows, n)))
    return made


def _quantize_packed(
    weight: Tensor,
    made: dict[str, Tensor],
    layout: WeightLayout,
    errors: Errors | None,
    rows: slice,
) -> None:
    columns = slice(rows.start, -(-rows.stop // 4) * 4)
    places = {name: tensor[:, columns] for name, tensor in made.items() if name != "codes"}
    places["codes"] = made["codes"][rows]
    of_rows = None if errors is None else errors.rows[rows]
    quantize_packed_(weight[rows], packed(layout, places), of_rows)


def _quantize_float8(
    weight: Tensor,
    made: dict[str, Tensor],
    layout: WeightLayout,
    errors: Errors | None,
    rows: slice,
) -> None:
    codes, scales, _ = quantize(weight[rows], layout.format, group_size=layout.group_size)
    made["codes"][rows, : layout.shape[1]] = codes.view(torch.uint8)
    made["scales"][: scales.shape[1], rows] = scales.t()
    if errors is not None:
        of_codes: dict[str, Any] = dict(format=layout.format, group_size=layout.group_size)
        floats = dequantize(codes, scales, **of_codes, dtype=torch.float32)
        errors.note(rows.start, weight[rows], floats, scales)


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
