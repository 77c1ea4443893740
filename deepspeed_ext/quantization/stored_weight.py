"""StoredWeight: a weight of integers as a file has it, rewritten as ours a block of rows at a time.

What is common to the packages whose files are read: eight or four codes in an int32, from its
lowest bits on, and columns whose groups are mixed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deepspeed_ext.ops.quantization.formats import pack_nibbles, unpack_nibbles
from deepspeed_ext.ops.quantization.packed_weight import lines_of_bytes
from deepspeed_ext.quantization.layout import WeightLayout

_BLOCK_ELEMENTS = 1 << 22  # some of them lie about as bytes on the way
_ROWS = 8  # a block begins at a multiple of them, as words may hold rows


class Stored(Protocol):
    """A weight in whatever form.

    Attributes:
        layout: what it becomes.
        order: (in,), int64: see `StoredWeight`.
    """

    @property
    def layout(self) -> WeightLayout: ...
    @property
    def order(self) -> Tensor | None: ...

    def write(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the layout, of which all but `order` may be rows of larger ones."""


class Packing(Protocol):
    """How a method stores the weights of layers.

    Attributes:
        mark: the tensor that says that a layer is stored so.
        parts: all tensors that a layer may have, beside its bias.
    """

    mark: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]

    def stored(self, what: str, tensors: Mapping[str, Tensor], length: int) -> Stored:
        """Return the weight of a layer; of tensors on meta, all but its values.

        Args:
            what: begins the text of an error: which layer of which file.
            tensors: those of `parts` that are there.
            length: elements of a row.

        Raises:
            ValueError: a tensor is missing, or does not fit the others.
        """


@dataclass(frozen=True)
class StoredWeight:
    """A weight, (n, length), as codes that stand for code * scale + offset.

    Args:
        layout: what it becomes.
        codes: returns those of rows from one number to another, as ``pack_weight`` takes them,
            columns in the order of the file.
        scales: (groups, n).
        offsets: likewise, or None.
        order: (in,), int64: which column of the file is each of ours; None: as they stand.
    """

    layout: WeightLayout
    codes: Callable[[int, int], Tensor]
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None

    def write(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the layout; never more than a block lies about."""
        n, length = self.layout.shape
        bits = self.layout.of_format.bits
        rows = max(_BLOCK_ELEMENTS // max(length, 1) // _ROWS, 1) * _ROWS
        for begin in range(0, n, rows):
            end = min(begin + rows, n)
            codes = self.codes(begin, end)
            if self.order is not None and bits == 4:
                codes = pack_nibbles(unpack_nibbles(codes, length)[:, self.order])
            elif self.order is not None:
                codes = codes[:, self.order]
            is_biased = self.offsets is not None
            lines = lines_of_bytes(codes, bits, length, self.layout.format, is_biased)
            into["codes"][begin:end].copy_(lines)
        into["scales"][:, :n].copy_(self.scales)
        if self.offsets is not None:
            into["offsets"][:, :n].copy_(self.offsets)
        if self.order is not None:
            into["order"].copy_(self.order)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a layer keeps."""
        made = self.layout.tensors_on(self.scales.device)
        self.write(made)
        return made


def words_of(words: Tensor, bits: int = 4) -> Tensor:
    """Return the numbers of each int32 along the last dimension, as uint8."""
    as_bytes = words.contiguous().view(torch.uint8)
    return as_bytes if bits == 8 else unpack_nibbles(as_bytes, words.shape[-1] * 8)


def order_of(
    what: str, name: str, g_idx: Tensor | None, length: int, group: int, is_mixed: bool
) -> Tensor | None:
    """Return the columns in the order of their groups, or None if they are.

    Args:
        what: begins the text of an error.
        name: of the tensor.
        g_idx: the group of each column, or None.
        length: how many there are.
        group: columns in each group.
        is_mixed: what is taken for true on meta, where there are no values.

    Raises:
        ValueError: there are other numbers of columns in groups.
    """
    if g_idx is None:
        return None
    if g_idx.shape != (length,) or g_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{what} has {name} as {g_idx.dtype} of shape {list(g_idx.shape)}, expected whole"
            f" numbers of shape {[length]}"
        )
    if g_idx.is_meta:
        return g_idx.long() if is_mixed else None
    in_order = torch.arange(length, device=g_idx.device) // group
    if torch.equal(g_idx.long(), in_order):
        return None
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], in_order):
        raise ValueError(
            f"{what} has {name} with groups of other sizes, expected {group} columns in each"
        )
    return order
