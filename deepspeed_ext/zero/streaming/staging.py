"""What comes from a scratch file to the device: by way of pinned memory, a piece at a time."""

from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.io import Future, PinnedPool
from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.offload.copies import Copy
from deepspeed_ext.zero.streaming.pieces import Piece
from deepspeed_ext.zero.streaming.scratch import ScratchMemory


class _Run(NamedTuple):
    """Bytes that lie together in the file, and in a piece."""

    begin: int  # in the piece
    end: int
    offset: int  # in the file


class Reading:
    """A piece that is read to pinned memory, or is there: what of it lies in the file.

    Attributes:
        rows: of the piece that are.
    """

    def __init__(self, memory: Tensor, runs: list[_Run], rows: frozenset[int]) -> None:
        self._memory, self._runs = memory, runs
        self._futures: list[Future] = []
        self.rows = rows

    def begin(self, scratch: ScratchMemory) -> None:
        """Begin to read."""
        for run in self._runs:
            self._futures.append(scratch.read(self._memory[run.begin : run.end], run.offset))

    def copies_to(self, memory: Tensor) -> list[Copy]:
        """Wait until it is there, and return what brings it to memory of a device.

        Raises:
            OSError: it cannot be read.
        """
        for future in self._futures:
            future.result()
        parts = [(run.begin, run.end) for run in self._runs]
        return [Copy(memory[begin:end], self._memory[begin:end]) for begin, end in parts]

    def settle(self) -> None:
        """Wait until nothing is read any more."""
        for future in self._futures:
            future.exception()


class Staging:
    """Pinned memory for what is read from a scratch file.

    Args:
        scratch: the file.
        most: how many pieces are read, or copied from there, at once.
    """

    def __init__(self, scratch: ScratchMemory, most: int) -> None:
        self._scratch, self._most = scratch, most
        self._pool = PinnedPool(0)
        self._largest = 0  # bytes of a piece: all get as much, so that any may have it next

    def begin(self, piece: Piece) -> Reading | None:
        """Begin to read what lies in the file; None: nothing does."""
        runs, rows = self._runs(piece)
        if not runs:
            return None
        self._largest = max(self._largest, whole_pages(piece.nbytes))
        self._pool.budget = self._most * self._largest
        made = Reading(self._pool.take(self._largest).tensor(), runs, frozenset(rows))
        made.begin(self._scratch)
        return made

    def _runs(self, piece: Piece) -> tuple[list[_Run], list[int]]:
        runs: list[_Run] = []
        rows: list[int] = []
        for row, param in enumerate(piece.params):
            offset = self._offset_of(param, piece, row)
            if offset is None:
                continue
            begin = piece.begins[row]
            run = _Run(begin, begin + param.nbytes, offset)
            is_next = bool(rows) and rows[-1] == row - 1  # else others come in between
            if is_next and offset - runs[-1].offset == begin - runs[-1].begin:
                run = runs.pop()._replace(end=run.end)
            runs.append(run)
            rows.append(row)
        return runs, rows

    def _offset_of(self, param: Tensor, piece: Piece, row: int) -> int | None:
        """Return where a parameter lies in the file, byte for byte as in the piece."""
        now, look = param.detach(), piece.looks[row]
        if (now.dtype, now.shape, now.stride()) != (look.dtype, look.shape, look.stride):
            return None
        return self._scratch.offset_of(now) if now.device.type == "cpu" else None
