"""Where the blocks of a layout lie, so that products and softmax take many lines of them at once.

A tile is a block of a matrix that is there; tiles are numbered by head, then row, then column. A
line is a row or a column of blocks of one head. Lines of about as many tiles are in one group, of
which a batched operation makes one piece of work.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_whole


@dataclass(frozen=True)
class TileGroup:
    """Lines of about as many tiles.

    Args:
        lines: (lines,) their numbers, head x lines of a head + line.
        tiles: (lines, size), the tiles of each; the last one again where it has fewer.
        is_padding: (lines, size), bool, where that is so; None where it is nowhere.
    """

    lines: Tensor
    tiles: Tensor
    is_padding: Tensor | None

    def padded(self, values: Tensor, value: float = 0.0) -> Tensor:
        """Return values of (batch, lines, size, ...) with another one for what is padding."""
        if self.is_padding is None:
            return values
        mask = self.is_padding.view(*self.is_padding.shape, *[1] * (values.dim() - 3))
        return values.masked_fill(mask, value)

    def to(self, device: torch.device) -> "TileGroup":
        """Return the same on another device."""
        padding = None if self.is_padding is None else self.is_padding.to(device)
        return TileGroup(self.lines.to(device), self.tiles.to(device), padding)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a layout.

    Args:
        block: tokens in a block.
        head, row, column: (tiles,), of each.
        by_row: rows of blocks; a row without tiles is in no group.
        by_column: columns of blocks, likewise.
        places: (tiles,), where each is among the tiles of all groups of rows, one behind the other.
    """

    block: int
    head: Tensor
    row: Tensor
    column: Tensor
    by_row: tuple[TileGroup, ...]
    by_column: tuple[TileGroup, ...]
    places: Tensor

    def to(self, device: torch.device) -> "Tiles":
        """Return the same on another device."""
        return Tiles(
            self.block,
            self.head.to(device),
            self.row.to(device),
            self.column.to(device),
            tuple(group.to(device) for group in self.by_row),
            tuple(group.to(device) for group in self.by_column),
            self.places.to(device),
        )


class TileIndex:
    """A layout, as products and softmax of tiles need it; what becomes of the layout is nothing.

    Args:
        op: for the text of an error.
        layout: (heads, rows, columns), or (rows, columns) of one head; what is not 0 is there.
        block: tokens in a block.

    Raises:
        TypeError: layout is no tensor, or block no whole number.
        ValueError: it has other dimensions, or block is less than 1.
    """

    def __init__(self, op: str, layout: Tensor, block: int) -> None:
        if not isinstance(layout, Tensor):
            raise TypeError(f"{op}: layout is a {type(layout).__name__}, expected a tensor")
        if layout.dim() not in (2, 3):
            raise ValueError(
                f"{op}: layout has shape {list(layout.shape)}, expected (heads, rows, columns), or"
                " (rows, columns) of one head"
            )
        check_whole(op, block=block)
        if block < 1:
            raise ValueError(f"{op}: block is {block}, expected at least 1")
        there = layout.detach().cpu() != 0
        there = there if there.dim() == 3 else there[None]
        self.heads, self.rows, self.columns = there.shape
        self.block = int(block)
        head, row, column = there.nonzero().unbind(1)
        self.count = len(head)
        by_row = _groups(head * self.rows + row, self.heads * self.rows)
        by_column = _groups(head * self.columns + column, self.heads * self.columns)
        here = Tiles(self.block, head, row, column, by_row, by_column, _places(by_row, self.count))
        self._here = {torch.device("cpu"): here}

    def on(self, device: torch.device) -> Tiles:
        """Return the tiles with their numbers on a device, where these stay."""
        if device not in self._here:
            self._here[device] = self._here[torch.device("cpu")].to(device)
        return self._here[device]


def _groups(line: Tensor, lines: int) -> tuple[TileGroup, ...]:
    """Return the lines that have tiles, those of about as many in one group.

    A number of tiles is rounded up to one of three significant binary digits: at most a quarter of
    a group is padding, and groups are few however many numbers there are.

    Args:
        line: (tiles,), of each.
        lines: how many there are.
    """
    order = line.argsort(stable=True)
    counts = line.bincount(minlength=lines)
    first = counts.cumsum(0) - counts
    digits = torch.frexp((counts - 1).clamp(min=1).double()).exponent
    step = 2 ** (digits - 3).clamp(min=0).long()
    sizes = (counts + step - 1) // step * step
    groups = []
    for size in sizes[counts > 0].unique().tolist():
        mine = (sizes == size).nonzero().flatten()
        place = torch.arange(size, device="cpu").expand(len(mine), size)
        last = counts[mine, None] - 1
        is_padding = place > last
        tiles = order[first[mine, None] + place.minimum(last)]
        groups.append(TileGroup(mine, tiles, is_padding if is_padding.any() else None))
    return tuple(groups)


def _places(groups: tuple[TileGroup, ...], count: int) -> Tensor:
    places = torch.empty(count, dtype=torch.int64, device="cpu")
    begin = 0
    for group in groups:
        at = begin + torch.arange(group.tiles.numel(), device="cpu").view_as(group.tiles)
        is_tile = ... if group.is_padding is None else ~group.is_padding
        places[group.tiles[is_tile].flatten()] = at[is_tile].flatten()
        begin += group.tiles.numel()
    return places
