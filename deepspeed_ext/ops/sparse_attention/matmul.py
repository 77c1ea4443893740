"""MatMul: products of which one matrix is there in some blocks only, by torch's batched ones."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_flags, check_kinds
from deepspeed_ext.ops.sparse_attention.tile_groups import TileIndex

_MODES = ("sdd", "dsd", "dds")


class MatMul:
    """Multiply matrices of which one, or the product, is there in the blocks of a layout only.

    Such a matrix is kept as tiles, (batch, tiles, block, block), numbered by head, then row, then
    column of the blocks that the layout names. A call takes a and b and returns their product,
    with gradients of both, of any order:

    - "sdd": tiles of a @ b, of two dense matrices.
    - "dsd": a @ b, where a is tiles. Rows of blocks without tiles are zeros.
    - "dds": a @ b, where b is tiles, likewise.

    Products are torch's, as many lines of tiles at once as have about as many; each sum is one
    product, in the precision that torch has for it, and the same in every run. Under autocast, a
    and b are cast to its dtype.

    From that of DeepSpeed 0.9.0 differs: any dtype, on the CPU and on CUDA; any block, and any
    inner size; a layout of one head without that dimension works; sizes that do not fit are errors
    in every mode; nothing is shared between objects or stays of a layout that is changed later.

    Args:
        layout: (heads, rows, columns), or (rows, columns) of one head; what is not 0 is there.
        block: rows and columns in a block.
        mode: which of the three.
        trans_a: a is transposed; of tiles, layout and tiles are those of a as it is.
        trans_b: likewise.
        bench: taken, as there; nothing is timed.

    Raises:
        ValueError: mode is none of the three, or the layout has other dimensions.
    """

    def __init__(
        self,
        layout: Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"MatMul: mode is {mode!r}, expected {', '.join(map(repr, _MODES))}")
        self.mode, self.trans_a, self.trans_b = mode, bool(trans_a), bool(trans_b)
        check_flags("MatMul", trans_a=trans_a, trans_b=trans_b)
        self._index = TileIndex("MatMul", layout, block)
        self.block = int(block)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply.

        Args:
            a: (batch, heads, m, k), with fewer dimensions of a batch or a head of 1; transposed
                (batch, heads, k, m). Tiles are (batch, tiles, block, block), or without a batch.
            b: (batch, heads, k, n), likewise.

        Returns:
            (batch, heads, m, n), or tiles, without dimensions of 1 that a and b did not have.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        check_kinds("MatMul", a=(a, Tensor), b=(b, Tensor))
        dimensions = max(a.dim(), b.dim())
        a, b = self._checked(*self._cast(a, b))
        out = _product(self._index, self.mode, a, b, self.trans_a, self.trans_b)
        while out.dim() > dimensions and out.shape[0] == 1:
            out = out.squeeze(0)
        return out

    def _cast(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if a.device != b.device:
            raise ValueError(f"MatMul: b is on {b.device}, expected {a.device}")
        if torch.is_autocast_enabled(a.device.type):
            dtype = torch.get_autocast_dtype(a.device.type)
            a, b = (t if t.dtype == torch.float64 else t.to(dtype) for t in (a, b))
        if a.dtype != b.dtype:
            raise ValueError(f"MatMul: b is {b.dtype}, expected {a.dtype}, that of a")
        return a, b

    def _checked(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with all dimensions, if they fit the layout and each other."""
        for name, value in (("a", a), ("b", b)):
            least = 3 if self._is_tiles(name) else 2
            if not least <= value.dim() <= 4:
                raise ValueError(
                    f"MatMul: {name} has {value.dim()} dimensions, expected {least} to 4"
                )
        a, b = (value[(None,) * (4 - value.dim())] for value in (a, b))
        for name, value, want in zip("ab", (a, b), self._shapes(a, b), strict=True):
            if list(value.shape) != want:
                raise ValueError(
                    f"MatMul: {name} has shape {list(value.shape)}, expected {want}, as the layout"
                    " and the other one are"
                )
        return a, b

    def _shapes(self, a: Tensor, b: Tensor) -> tuple[list[int], list[int]]:
        """Return what shapes they are to have; what is free is taken from them."""
        index, batch, size = self._index, a.shape[0], self._index.block
        lines, columns = index.rows * size, index.columns * size
        tiles = [batch, index.count, size, size]
        m, k = reversed(a.shape[2:]) if self.trans_a else a.shape[2:]
        n = b.shape[2 if self.trans_b else 3]
        if self.mode == "sdd":
            of_a, of_b = (lines, k), (k, columns)
        elif self.mode == "dsd":
            of_a, of_b = (lines, columns), (lines if self.trans_a else columns, n)
        else:
            of_a, of_b = (m, columns if self.trans_b else lines), (lines, columns)
        of_a = of_a[::-1] if self.trans_a else of_a
        of_b = of_b[::-1] if self.trans_b else of_b
        dense = [[batch, index.heads, *each] for each in (of_a, of_b)]
        return (
            tiles if self._is_tiles("a") else dense[0],
            tiles if self._is_tiles("b") else dense[1],
        )

    def _is_tiles(self, name: str) -> bool:
        return self.mode == {"a": "dsd", "b": "dds"}[name]


class _Product(torch.autograd.Function):
    """The three products, whose gradients are such products: sdd for tiles, else the others."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, index: TileIndex, mode: str, trans_a: bool, trans_b: bool
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.options = index, mode, trans_a, trans_b
        if mode == "sdd":
            return _tiles_of(index, a.mT if trans_a else a, b if trans_b else b.mT)
        if mode == "dsd":
            return _times(index, a, b.mT if trans_b else b, trans_a)
        return _times(index, b, a if trans_a else a.mT, not trans_b).mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        index, mode, trans_a, trans_b = ctx.options
        of_a, of_b = {"sdd": ("dsd", "dds"), "dsd": ("sdd", "dsd"), "dds": ("dds", "sdd")}[mode]
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            if of_a == "sdd" and trans_a:
                grad_a = _product(index, of_a, b, grad, trans_b, True)
            else:
                grad_a = _product(index, of_a, grad, b, False, not trans_b)
                grad_a = grad_a.mT if trans_a else grad_a
        if ctx.needs_input_grad[1]:
            if of_b == "sdd" and trans_b:
                grad_b = _product(index, of_b, grad, a, True, trans_a)
            else:
                grad_b = _product(index, of_b, a, grad, not trans_a, False)
                grad_b = grad_b.mT if trans_b else grad_b
        return grad_a, grad_b, None, None, None, None


def _product(
    index: TileIndex, mode: str, a: Tensor, b: Tensor, trans_a: bool, trans_b: bool
) -> Tensor:
    out: Tensor = _Product.apply(a, b, index, mode, trans_a, trans_b)  # type: ignore[no-untyped-call]
    return out


def _tiles_of(index: TileIndex, left: Tensor, right: Tensor) -> Tensor:
    """Return the tiles of left @ right.mT, of (batch, heads, lines, n) both."""
    tiles, size = index.on(left.device), index.block
    rows = left.unflatten(2, (index.rows, size))[:, tiles.head, tiles.row]
    columns = right.unflatten(2, (index.columns, size))[:, tiles.head, tiles.column]
    out: Tensor = rows @ columns.mT
    return out


def _times(index: TileIndex, values: Tensor, dense: Tensor, turned: bool) -> Tensor:
    """Return the matrix of tiles, transposed where turned is True, times a dense one.

    Args:
        index: of the tiles.
        values: (batch, tiles, block, block).
        dense: (batch, heads, lines, n).
        turned: as above.
    """
    tiles, size = index.on(values.device), index.block
    groups, partner = (tiles.by_column, tiles.row) if turned else (tiles.by_row, tiles.column)
    lines, inner = (index.columns, index.rows) if turned else (index.rows, index.columns)
    blocks = dense.unflatten(2, (inner, size))
    n = dense.shape[-1]
    out = values.new_zeros(values.shape[0], index.heads * lines, size, n)
    for group in groups:
        left = group.padded(values[:, group.tiles])
        left = (left.mT if turned else left).transpose(2, 3).flatten(3)
        right = group.padded(blocks[:, tiles.head[group.tiles], partner[group.tiles]])
        out[:, group.lines] = left @ right.flatten(2, 3)
    return out.view(values.shape[0], index.heads, lines * size, n)
