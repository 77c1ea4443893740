"""Products of many rows with a weight of codes, by a kernel that keeps no floats of it."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.few_rows import MOST_ROWS, is_known
from deepspeed_ext.ops.quantization.formats import FORMATS, number_of
from deepspeed_ext.ops.quantization.packed_weight import (
    LINE_BYTES,
    RUN_BYTES,
    PackedWeight,
    libraries_of,
    unpack_weight,
)
from deepspeed_ext.torch_internals.dispatch import is_in_forward_mode, is_in_transform

# Of more rows the pass that makes floats of the weight takes less time than making them for each
# tile of rows anew, and torch's own products are as fast as they get. So do 32 blocks on an H200,
# of 4,096 rows of a weight, where 112 take 0.83 of the time of both passes: they are to be busy.
_MOST_ROWS_OF_CODES = 512
_BLOCK, _ROWS_OF_BLOCK = 128, 256  # rows of the weight, of x; see quantized_many_rows_cuda.cuh
_BUSY = 0.75  # of the processors, while there is work for some
_WHOLE = LINE_BYTES // 2  # elements: a line of x


def _fake(x: Tensor, codes: Tensor, *others: Tensor | None, **options: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


_OPS = {
    bits: define(
        f"quantized_product.w{bits}(Tensor x, Tensor codes, Tensor scales, Tensor? offsets,"
        " Tensor? bias, *, int format, int group_size) -> Tensor",
        {"cuda": libraries_of(bits)["cuda"]},
        fake=_fake,
    )
    for bits in (4, 8)
}


@register_flop_formula([_OPS[4].overloadpacket])
def _flops(x: Any, codes: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return int(2 * math.prod(x) * codes[0])


def quantized_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ w.T + bias, of elements of w that are rounded to the dtype of x.

    Nothing but torch's gradient to `bias` passes.
    """
    if not _takes_codes(x, weight, bias):
        return F.linear(x, unpack_weight(weight, x.dtype), bias)
    number = number_of("quantized_linear", weight.format)
    out: Tensor = _OPS[FORMATS[number].bits](
        *(x, weight.codes, weight.scales, weight.offsets, bias),
        format=number,
        group_size=weight.group_size,
    )
    return out


def _takes_codes(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> bool:
    """Tell whether the kernel takes them: see quantized_many_rows.h; what is wrong others say."""
    if not x.is_cuda or x.dtype == torch.float32 or weight.format == "nf4":
        return False
    if not torch.compiler.is_compiling() and (is_in_forward_mode() or is_in_transform()):
        return False
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return False
    bits = FORMATS[number_of("quantized_linear", weight.format)].bits
    line, run, group = LINE_BYTES * 8 // bits, RUN_BYTES * 8 // bits, weight.group_size
    lines = group >= weight.length or group % line == 0
    parts = group >= run and line % group == 0
    rows, columns = math.prod(x.shape[:-1]), weight.codes.shape[0]
    return (
        (lines or parts)
        and weight.length > 0
        and weight.length % _WHOLE == 0
        and columns > 0
        and is_known(rows, lambda count: count > MOST_ROWS)
        and is_known(rows, lambda count: count <= _MOST_ROWS_OF_CODES)
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and _fills(columns, rows, torch.cuda.get_device_properties(x.device).multi_processor_count)
    )


def _fills(columns: int, rows: int, processors: int) -> bool:
    """Tell whether blocks for so many rows of a weight and of x keep most processors busy."""
    blocks = -(-columns // _BLOCK) * -(-rows // _ROWS_OF_BLOCK)
    return blocks >= _BUSY * processors * -(-blocks // processors)
