"""Products of rows with the quantized weights of their experts, by torch's multiplications."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops.linear.few_rows import check_like, without_autocast
from deepspeed_ext.ops.linear.grouped_products import (
    check_rows,
    finished,
    parts,
    products_of_blocks,
)
from deepspeed_ext.ops.quantization.formats import FORMATS
from deepspeed_ext.ops.quantization.packed_weight import PackedWeight, unpack_weight

_NAME = "grouped_quantized_linear"


def products_cpu(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight_offsets: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    *,
    format: int,
    group_size: int,
    length: int,
    transposed: bool,
) -> Tensor:
    """Return x @ w.T + b for each row, or x @ w if transposed; 0 behind the last offset.

    Floats are made of the weight of one expert at a time, of those that have rows.
    """
    weight = PackedWeight(codes, scales, weight_offsets, FORMATS[format].name, group_size, length)
    n = _check(x, weight, offsets, bias, transposed)
    out = x.new_zeros(x.shape[0], length if transposed else n)
    with without_autocast(x):
        for expert, rows in parts(offsets, x.shape[0], _NAME):
            floats = unpack_weight(_of_expert(weight, expert, n), x.dtype)
            columns = floats if transposed else floats.t()
            if bias is None:
                torch.mm(x[rows], columns, out=out[rows])
            else:
                torch.addmm(bias[expert], x[rows], columns, out=out[rows])
    return out


def products_cuda(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight_offsets: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    *,
    format: int,
    group_size: int,
    length: int,
    transposed: bool,
) -> Tensor:
    """Do what `products_cpu` does; what is in offsets is not checked.

    Floats are made of the weights of some blocks of rows at a time.
    """
    weight = PackedWeight(codes, scales, weight_offsets, FORMATS[format].name, group_size, length)
    n = _check(x, weight, offsets, bias, transposed)
    offsets = offsets.contiguous()
    sizes = (length, n) if transposed else (n, length)
    if x.numel() == 0 or codes.numel() == 0:
        out = x.new_zeros(x.shape[0], sizes[0])
        return finished(out, offsets, bias) if out.numel() else out

    def floats_of(experts: Tensor) -> Tensor:
        floats = unpack_weight(_of_experts(weight, experts, n), x.dtype).view(-1, n, length)
        return floats.transpose(1, 2) if transposed else floats

    with torch.cuda.device_of(x), without_autocast(x):
        return finished(products_of_blocks(x, *sizes, offsets, floats_of), offsets, bias)


def _of_experts(weight: PackedWeight, experts: Tensor, n: int) -> PackedWeight:
    """Return a copy of the weights of some experts, one after the other."""
    rows = (experts[:, None] * n + torch.arange(n, device=experts.device)).flatten()

    def of_groups(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return F.pad(values.index_select(1, rows), (0, -rows.numel() % 4))

    scales = of_groups(weight.scales)
    assert scales is not None
    return weight._replace(
        codes=weight.codes.index_select(0, rows), scales=scales, offsets=of_groups(weight.offsets)
    )


def _of_expert(weight: PackedWeight, expert: int, n: int) -> PackedWeight:
    """Return the weight of one expert; its codes are no copy."""
    begin, end = expert * n, (expert + 1) * n

    def of_groups(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return F.pad(values[:, begin:end], (0, -n % 4)).contiguous()

    scales = of_groups(weight.scales)
    assert scales is not None
    return weight._replace(
        codes=weight.codes[begin:end], scales=scales, offsets=of_groups(weight.offsets)
    )


def _check(
    x: Tensor, weight: PackedWeight, offsets: Tensor, bias: Tensor | None, transposed: bool
) -> int:
    """Refuse what torch would broadcast, promote or not name; return how many rows experts have."""
    check_rows("x", x, _NAME)
    check_like(_NAME, "offsets", offsets, x, (offsets.numel(),), torch.int32)
    rows, experts = weight.codes.shape[0], offsets.numel()
    if rows % max(1, experts) or (experts == 0 and rows > 0):
        raise ValueError(
            f"{_NAME}: weight has {rows} rows, expected as many for each of {experts} experts"
        )
    n = rows // max(1, experts)
    if x.shape[1] != (n if transposed else weight.length):
        want = n if transposed else weight.length
        raise ValueError(f"{_NAME}: x has shape {list(x.shape)}, expected [..., {want}]")
    if bias is not None:
        check_like(_NAME, "bias", bias, x, (experts, n), x.dtype)
    return n
