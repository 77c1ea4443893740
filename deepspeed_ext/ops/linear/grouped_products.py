"""Products of rows with the weights of their experts, by torch's multiplications.

Nowhere does the host read what is on a device. On the CPU each expert's rows are multiplied in
turn. On CUDA torch has a kernel for bfloat16; for all else it would read the offsets, so here rows
are put into blocks of one expert each, of which there are at most as many as the sizes say.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.few_rows import (
    check_like,
    check_memory,
    named,
    without_autocast,
)

_NAME = "grouped_linear"
_MOST_GROUPS = 1023  # that torch's kernel takes
_WORKSPACE = 128 << 20  # bytes of copied weights, or of their gradients, at a time; one at least


def _clear_cpu(rows: Tensor, offsets: Tensor) -> None:
    rows[int(offsets[-1]) :] = 0


# Zeros in the rows behind the last offset, of which the host does not know how many there are.
_CLEAR = define(
    "grouped_linear_clear_(Tensor(a!) rows, Tensor offsets) -> ()",
    {"cpu": _clear_cpu, "cuda": "fused_grouped_linear"},
)


def clear_rows_of_nobody(rows: Tensor, offsets: Tensor) -> None:
    """Write zeros into the rows behind the last offset."""
    _CLEAR(rows, offsets)
    torch.autograd.graph.increment_version(rows)


def products_cpu(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ w.T + b for each row, w and b being its expert's; 0 behind the last offset."""
    _check(x, weight, offsets, bias)
    out = x.new_zeros(x.shape[0], weight.shape[1])
    with without_autocast(x):
        for expert, rows in parts(offsets, x.shape[0]):
            columns = weight[expert].t()
            if bias is None:
                torch.mm(x[rows], columns, out=out[rows])
            else:
                torch.addmm(bias[expert], x[rows], columns, out=out[rows])
    return out


def products_cuda(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Do what `products_cpu` does; what is in offsets is not checked."""
    _check(x, weight, offsets, bias)
    offsets = offsets.contiguous()  # torch's kernel takes any for that, and says nothing
    if weight.shape[0] == 0 or x.shape[0] == 0:
        return x.new_zeros(x.shape[0], weight.shape[1])
    with torch.cuda.device(x.device), without_autocast(x):
        if x.numel() == 0 or weight.numel() == 0:
            out = x.new_zeros(x.shape[0], weight.shape[1])
        elif _is_for_torch(x, offsets):
            columns = _aligned(weight, or_its_columns=True).transpose(1, 2)
            out = F.grouped_mm(_aligned(x), columns, offs=offsets).contiguous()
        else:
            _, n, length = weight.shape
            out = products_of_blocks(x, n, length, offsets, partial(weight.index_select, 0))
        return finished(out, offsets, bias)


def finished(out: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Add each row's bias, and clear the rows of nobody; in place."""
    if bias is not None:
        row = torch.arange(out.shape[0], dtype=offsets.dtype, device=out.device)
        expert = torch.searchsorted(offsets, row, right=True).clamp_(max=len(bias) - 1)
        out += bias.index_select(0, expert)
    clear_rows_of_nobody(out, offsets)
    return out


def outer_products_cpu(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return for each expert the sum of the outer products of its rows of grad and x."""
    _check_outer(grad, x, offsets)
    out = x.new_zeros(offsets.shape[0], grad.shape[1], x.shape[1])
    with without_autocast(x):
        for expert, rows in parts(offsets, x.shape[0]):
            torch.mm(grad[rows].t(), x[rows], out=out[expert])
    return out


def outer_products_cuda(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Do what `outer_products_cpu` does; what is in offsets is not checked."""
    _check_outer(grad, x, offsets)
    offsets = offsets.contiguous()
    if grad.numel() == 0 or x.numel() == 0 or offsets.numel() == 0:
        return x.new_zeros(offsets.shape[0], grad.shape[1], x.shape[1])
    with torch.cuda.device(x.device), without_autocast(x):
        if _is_for_torch(x, offsets):
            return F.grouped_mm(_aligned(grad).t(), _aligned(x), offs=offsets).contiguous()
        return _outer_products_of_blocks(grad, x, offsets)


def parts(offsets: Tensor, rows: int, op: str = _NAME) -> Iterator[tuple[int, slice]]:
    """Yield every expert that has rows, and which they are.

    Raises:
        ValueError: an offset is below the one before it, or beyond the rows.
    """
    begin = 0
    ends: list[int] = offsets.tolist()
    for expert, end in enumerate(ends):
        if not begin <= end <= rows:
            raise ValueError(
                f"{op}: offsets[{expert}] is {end}, expected a number from {begin} to {rows}"
            )
        if begin < end:
            yield expert, slice(begin, end)
        begin = end


def _is_for_torch(x: Tensor, offsets: Tensor) -> bool:
    """Tell whether torch multiplies on the device without reading offsets on the host."""
    if x.dtype != torch.bfloat16 or offsets.shape[0] > _MOST_GROUPS:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _aligned(tensor: Tensor, or_its_columns: bool = False) -> Tensor:
    """Return a tensor whose rows, or else columns, begin at multiples of 16 bytes, as torch asks.

    A copy, if they do not: with room behind each row, so that nothing is added to the sums.
    """
    step = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and all(each % step == 0 for each in tensor.stride()[:-2]):
        for along, across in ((-1, -2), (-2, -1))[: 1 + or_its_columns]:
            distance = tensor.stride(across)
            fits = distance >= max(1, tensor.shape[along]) and distance % step == 0
            if tensor.stride(along) == 1 and fits:
                return tensor
    length = tensor.shape[-1]
    room = tensor.new_empty(*tensor.shape[:-1], -(-length // step) * step)
    return room[..., :length].copy_(tensor)


class _Blocks(NamedTuple):
    """Where rows are when each expert's begin a block.

    Args:
        size: how many rows a block has.
        places: of each row; of those behind the last offset, the one behind all blocks.
        experts: whose rows are in each block; any expert, if there are none.
    """

    size: int
    places: Tensor
    experts: Tensor

    def put(self, rows: Tensor) -> Tensor:
        """Return (blocks, size, n): rows at their places, and zeros between them."""
        count = self.experts.shape[0] * self.size
        room = rows.new_zeros(count + 1, rows.shape[1]).index_copy_(0, self.places, rows)
        return room[:count].view(-1, self.size, rows.shape[1])

    def chunks(self, bytes_of_block: int) -> Iterator[slice]:
        """Yield all blocks, as many at a time as the workspace has room for."""
        step, count = max(1, _WORKSPACE // bytes_of_block), self.experts.shape[0]
        return (slice(begin, min(begin + step, count)) for begin in range(0, count, step))


def _blocks(rows: int, offsets: Tensor) -> _Blocks:
    """Cut rows into blocks that are as long as an expert has rows on average, from 16 to 1,024.

    Then there are at most two for each expert, or one for it and one for each 1,024 rows; copying
    its weight takes less time than multiplying as many rows with it.
    """
    experts, last = offsets.shape[0], offsets.shape[0] - 1
    size = min(1024, max(16, 1 << ((rows - 1) // experts).bit_length()))
    count = rows // size + min(rows, experts)
    zero = offsets.new_zeros(1)
    begins = torch.cat([zero, offsets[:-1]])
    ends_of_blocks = torch.div(offsets - begins + (size - 1), size, rounding_mode="floor").cumsum(0)
    begins_of_blocks = torch.cat([zero.long(), ends_of_blocks[:-1]])
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.searchsorted(offsets, row, right=True)
    within = expert.clamp(max=last)
    places = begins_of_blocks[within] * size + (row - begins[within])
    places = torch.where(expert <= last, places, count * size).clamp_(0, count * size)
    block = torch.arange(count, device=offsets.device)
    owners = torch.searchsorted(ends_of_blocks, block, right=True).clamp_(max=last)
    return _Blocks(size, places, owners)


def products_of_blocks(
    x: Tensor, n: int, length: int, offsets: Tensor, weights_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return x @ w.T for each row, block by block.

    Args:
        n: rows of each expert's weight.
        length: of these rows.
        weights_of: returns (blocks, n, length) for the numbers of the experts of some blocks.
    """
    blocks = _blocks(x.shape[0], offsets)
    lines = blocks.put(x)
    out = x.new_zeros(len(lines) * blocks.size + 1, n)
    there = out[:-1].view(-1, blocks.size, n)
    for chunk in blocks.chunks(n * length * x.element_size()):
        weights = weights_of(blocks.experts[chunk])
        torch.bmm(lines[chunk], weights.transpose(1, 2), out=there[chunk])
    return out.index_select(0, blocks.places)


def _outer_products_of_blocks(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    blocks = _blocks(x.shape[0], offsets)
    left, right = blocks.put(grad).transpose(1, 2), blocks.put(x)
    n, length = grad.shape[1], x.shape[1]
    out = x.new_zeros(offsets.shape[0], n, length, dtype=torch.float32)
    options: Any = {} if x.dtype == torch.float32 else dict(out_dtype=torch.float32)
    for chunk in blocks.chunks(4 * n * length):
        parts = torch.bmm(left[chunk], right[chunk], **options)
        # Other than index_add_ this adds in the order of the blocks.
        out.index_put_((blocks.experts[chunk],), parts, accumulate=True)
    return out.to(x.dtype)


def _check(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
    """Refuse what torch would broadcast, promote or not name."""
    check_rows("x", x)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"{_NAME}: weight has shape {list(weight.shape)}, expected three dimensions, the"
            f" last one of {x.shape[1]}"
        )
    experts, n, _ = weight.shape
    check_like(_NAME, "weight", weight, x, weight.shape, x.dtype)
    check_like(_NAME, "offsets", offsets, x, (experts,), torch.int32)
    if bias is not None:
        check_like(_NAME, "bias", bias, x, (experts, n), x.dtype)
    check_memory(_NAME, x=x, weight=weight, offsets=offsets, bias=bias)


def _check_outer(grad: Tensor, x: Tensor, offsets: Tensor) -> None:
    """Do so for what backward is called with, which is wrong only if the op is called by itself."""
    check_rows("x", x)
    check_rows("grad", grad)
    check_like(_NAME, "grad", grad, x, (x.shape[0], grad.shape[1]), x.dtype)
    check_like(_NAME, "offsets", offsets, x, (offsets.numel(),), torch.int32)
    check_memory(_NAME, grad=grad, x=x, offsets=offsets)


def check_rows(name: str, rows: Tensor, op: str = _NAME) -> None:
    """Refuse rows that do not lie in two dimensions, or are no floats."""
    if rows.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {list(rows.shape)}, expected two dimensions")
    if rows.dtype not in DTYPES:
        raise ValueError(
            f"{op}: {name} is {named(rows.dtype)}, expected float32, bfloat16 or float16"
        )
