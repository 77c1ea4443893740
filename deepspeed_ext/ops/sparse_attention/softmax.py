"""Softmax: of the rows of a matrix that is there in some blocks only, by the op softmax."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import refuse_gradients
from deepspeed_ext.ops.softmax_and_loss.softmax import softmax, softmax_gradient
from deepspeed_ext.ops.sparse_attention.tile_groups import TileGroup, TileIndex, Tiles

_MODES = ("add", "mul")


class Softmax:
    """Softmax of the rows of a matrix that is there in the blocks of a layout only.

    The matrix is kept as tiles, see MatMul. Scores are x * scale, plus rpe, plus masks; what is in
    no tile, and what a mask leaves out, has no part. A call returns a new tensor, and its gradient
    leaves that of the result as it is; that of DeepSpeed 0.9.0 overwrites both. A row of which
    nothing takes part is zeros, where theirs is NaN. Arithmetic is in float32. All else that a row
    promises, the op `softmax` promises.

    Args:
        layout: (heads, rows, columns), or (rows, columns) of one head; what is not 0 is there.
        block: rows and columns in a block.
        bench: taken, as there; nothing is timed.

    Raises:
        ValueError: the layout has other dimensions.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self._index = TileIndex("Softmax", layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """Return softmax of the rows of x, as tiles.

        Args:
            x: (batch, tiles, block, block), float32, bfloat16 or float16, on the CPU or on CUDA.
            scale: of x, finite.
            rpe: None, or floating, a shape that can be broadcast to (batch, heads, rows x block,
                columns x block): is added.
            key_padding_mask: None, or (batch or 1, columns x block). A bool mask keeps where it is
                True, whatever the mode is.
            attn_mask: None, or (rows x block, columns x block), or what can be broadcast as rpe;
                likewise.
            key_padding_mask_mode: "add", a floating mask is added; or "mul", what is not 0 is kept.
            attn_mask_mode: likewise.

        Raises:
            RuntimeError: rpe or a mask requires a gradient: there is none for it.
            ValueError: shapes, dtypes, devices or modes do not fit.
        """
        check_kinds("Softmax", x=(x, Tensor))
        others = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        refuse_gradients("Softmax", others)
        index = self._index
        if x.dim() != 4 or list(x.shape[1:]) != [index.count, index.block, index.block]:
            want = ["batch", index.count, index.block, index.block]
            raise ValueError(
                f"Softmax: x has shape {list(x.shape)}, expected ({', '.join(map(str, want))})"
            )
        modes = {"rpe": "add", "key_padding_mask": key_padding_mask_mode}
        modes["attn_mask"] = attn_mask_mode
        masks = [
            self._taken(name, mask, modes[name], x)
            for name, mask in others.items()
            if mask is not None or modes[name] not in _MODES
        ]
        if index.count == 0:
            return x * scale
        out: Tensor = _TileSoftmax.apply(x, scale, masks, index)  # type: ignore[no-untyped-call]
        return out

    def _taken(self, name: str, mask: Tensor | None, mode: str, x: Tensor) -> Tensor:
        """Return a mask as (batch or 1, heads, rows, block, columns, block), if it fits.

        Nothing of it is copied but what "mul" makes of it: bool, True where it keeps.
        """
        if mode not in _MODES:
            raise ValueError(f"Softmax: {name}_mode is {mode!r}, expected 'add' or 'mul'")
        check_kinds("Softmax", **{name: (mask, Tensor)})
        assert mask is not None
        if mask.device != x.device:
            raise ValueError(f"Softmax: {name} is on {mask.device}, expected {x.device}")
        if mask.dtype != torch.bool and mode == "mul":
            mask = mask != 0
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"Softmax: {name} is {mask.dtype}, expected bool or floating")
        index, size = self._index, self._index.block
        keys = index.columns * size
        shape = list(mask.shape)
        if name == "key_padding_mask":
            fits = mask.dim() == 2 and shape[0] in (1, x.shape[0]) and shape[1] == keys
            want = [x.shape[0], keys]
            mask = mask[:, None, None] if fits else mask
        else:
            want = [x.shape[0], index.heads, index.rows * size, keys]
            sizes = zip(reversed(shape), reversed(want), strict=False)
            fits = mask.dim() <= 4 and all(got in (1, full) for got, full in sizes)
            mask = mask[(None,) * (4 - mask.dim())] if fits else mask
        if not fits:
            raise ValueError(f"Softmax: {name} has shape {shape}, expected {want}")
        mask = mask.expand(-1, index.heads, index.rows * size, keys)
        blocks: Tensor = mask.unflatten(3, (index.columns, size)).unflatten(2, (index.rows, size))
        return blocks


class _TileSoftmax(torch.autograd.Function):
    """Rows of tiles as rows of memory, group by group, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, masks: list[Tensor], index: TileIndex) -> Tensor:
        tiles = index.on(x.device)
        parts = []
        for group in tiles.by_row:
            rows = softmax(_rows(x, group), _mask_of(masks, group, tiles), scale=scale)
            parts.append(_tiles(rows, index.block))
        out = torch.cat(parts, 1)[:, tiles.places]
        ctx.save_for_backward(out)
        ctx.scale, ctx.index = scale, index
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [out] = ctx.saved_tensors
        tiles = ctx.index.on(out.device)
        parts = []
        for group in tiles.by_row:
            rows = _rows(grad, group), _rows(out, group)
            grad_rows = softmax_gradient(*rows, ctx.scale, causal=False, offset=None)
            parts.append(_tiles(grad_rows, ctx.index.block))
        return torch.cat(parts, 1)[:, tiles.places], None, None, None


def _rows(x: Tensor, group: TileGroup) -> Tensor:
    """Return the rows of a group, (batch, lines, block, size x block), with 0 for padding."""
    return group.padded(x[:, group.tiles]).transpose(2, 3).flatten(3)


def _tiles(rows: Tensor, block: int) -> Tensor:
    """Return rows of a group as its tiles, (batch, lines x size, block, block)."""
    tiles: Tensor = rows.unflatten(3, (-1, block)).transpose(2, 3).flatten(1, 2)
    return tiles


def _mask_of(masks: list[Tensor], group: TileGroup, tiles: Tiles) -> Tensor | None:
    """Return all masks of the rows of a group as one: bool, or floating with -inf; None for none.

    Args:
        masks: (batch or 1, heads, rows, block, columns, block).
        group: of rows.
        tiles: of the layout.
    """
    mine = [_of_rows(mask, group, tiles) for mask in masks]
    kept = [mask for mask in mine if mask.dtype == torch.bool]
    added = [mask for mask in mine if mask.dtype != torch.bool]
    if group.is_padding is not None:
        size = tiles.block
        kept.append(~group.is_padding.repeat_interleave(size, 1)[:, None])
    keep = reduce(torch.logical_and, kept) if kept else None
    if not added:
        return keep
    total = added[0] if len(added) == 1 and added[0].dtype != torch.float64 else _sum_of(added)
    return total if keep is None else torch.where(keep, total, -torch.inf)


def _sum_of(masks: list[Tensor]) -> Tensor:
    return reduce(torch.add, (mask.float() for mask in masks))


def _of_rows(mask: Tensor, group: TileGroup, tiles: Tiles) -> Tensor:
    """Return what a mask has for the rows of a group, (batch or 1, lines, block or 1, keys)."""
    if mask.stride(2) == mask.stride(3) == 0:
        mask = mask[:, :, :, :1]  # all tokens of a row of blocks have the same
    first = group.tiles[:, :1]
    picked = mask[:, tiles.head[first], tiles.row[first], :, tiles.column[group.tiles]]
    return picked.permute(2, 0, 3, 1, 4).flatten(3)
