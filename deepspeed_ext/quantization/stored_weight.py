"""StoredWeight: a weight of integers as a file has it, rewritten as ours in one pass.

What is common to the packages whose files are read: eight or four codes in an int32, from its
lowest bits on, and columns whose groups are mixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deepspeed_ext.ops import repack_weight_
from deepspeed_ext.ops.quantization.formats import unpack_nibbles
from deepspeed_ext.quantization.layout import WeightLayout


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
    """A weight, (n, length), as codes that stand for (code - zero) * scale.

    Args:
        layout: what it becomes.
        words: as ``repack_weight_`` takes them, columns in the order of the file; of 8 bits the
            code 128 stands for 0.
        scales: (groups, n), of a dtype of floats.
        zeros: likewise, uint8 or int32; None: the code that has a zero in the middle.
        order: (in,), int64: which column of the file is each of ours; None: as they stand.
        across: whether words are across the rows.
    """

    layout: WeightLayout
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    across: bool = False

    def write(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the layout."""
        n, length = self.layout.shape
        repack_weight_(
            self.words,
            into["codes"],
            self.order,
            format=self.layout.format,
            length=length,
            biased=True,
            across=self.across,
        )
        scales = into["scales"][:, :n].copy_(self.scales)
        if self.zeros is not None:  # 4 or 8 bits times 11 of a scale: exact
            torch.mul(scales, self.zeros, out=into["offsets"][:, :n]).neg_()
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
