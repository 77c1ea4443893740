"""GroupedReader: tensors that lie in one file, large ones alone, small neighbours together."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.fresh_pages import FreshPages
from deepspeed_ext.io.checkpoint.packed_writer import (
    BUFFER_BYTES,
    HELD_BYTES,
    LARGE_BYTES,
    PIECE_BYTES,
    new_pages,
)
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.io.file import File

MAX_GAP = 64 << 10  # of unwanted bytes, between two small tensors that are read at once
Extent = tuple[str, int, int]  # name; where its bytes begin and end in the file


class GroupedReader:
    """Reads tensors as bytes, each into memory of its own.

    What is read begins and ends on a page of the file, and memory is chosen so that it does on a
    page of memory too. So no request needs a copy or the page cache, and a tensor is the part of
    its memory that it asked for.

    Args:
        engine: that reads.
        file: that is read.
        device: where the tensors are to be, cpu or cuda.
    """

    def __init__(self, engine: AsyncIO, file: File, device: torch.device) -> None:
        self._engine = engine
        self._file = file
        self._device = device
        self._page = max(file.offset_alignment, 1)
        self._end = file.size()
        self._window = Window(HELD_BYTES)
        self._pages = FreshPages()
        self._free: list[Tensor] = []  # buffers
        self._tensors: dict[str, Tensor] = {}

    def read(self, extents: Sequence[Extent]) -> dict[str, Tensor]:
        """Return the bytes of each: (bytes,), uint8, with no others in their storage.

        Args:
            extents: in any order; none is empty.
        """
        for group in _groups(sorted(extents, key=lambda extent: extent[1:])):
            if len(group) > 1 or group[0][2] - group[0][1] < LARGE_BYTES:
                self._read_small(group)
            elif self._device.type == "cpu":
                self._read_large(*group[0])
            else:
                self._read_to_device(*group[0])
        self._window.finish()
        return self._tensors

    def abandon(self) -> None:
        """Wait for what is under way; nothing, after `read`."""
        self._window.abandon()

    def _read_large(self, name: str, begin: int, end: int) -> None:
        first, last = self._outwards(begin, end)
        pages = self._pages.take(last - first)
        self._read_into(torch.frombuffer(pages, dtype=torch.uint8), first)
        self._tensors[name] = torch.frombuffer(  # whose storage is these bytes only
            pages, dtype=torch.uint8, count=end - begin, offset=begin - first
        )

    def _read_to_device(self, name: str, begin: int, end: int) -> None:
        self._tensors[name] = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        self._read_into(self._tensors[name], begin)

    def _read_into(self, memory: Tensor, offset: int) -> None:
        for start in range(0, memory.numel(), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            self._window.add(self._engine.read(piece, self._file, offset + start), piece.numel())

    def _read_small(self, group: Sequence[Extent]) -> None:
        first, last = self._outwards(group[0][1], group[-1][2])
        buffer = self._free.pop() if self._free else new_pages(BUFFER_BYTES)
        future = self._engine.read(buffer[: last - first], self._file, first)
        self._window.add(future, BUFFER_BYTES, partial(self._copy_out, group, buffer, first))

    def _copy_out(self, group: Sequence[Extent], buffer: Tensor, first: int) -> None:
        bytes_ = buffer[: group[-1][2] - first].to(self._device)
        for name, begin, end in group:
            self._tensors[name] = bytes_[begin - first : end - first].clone()
        self._free.append(buffer)

    def _outwards(self, begin: int, end: int) -> tuple[int, int]:
        """Return the whole pages of the file in which these bytes lie; the last one may be less."""
        last = (end + self._page - 1) // self._page * self._page
        return begin // self._page * self._page, min(last, self._end)


def _groups(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Cut what is sorted by place into what is read together: a large tensor, or small ones."""
    group: list[Extent] = []
    for extent in extents:
        _, begin, end = extent
        fits = (
            group
            and end - begin < LARGE_BYTES
            and group[-1][2] - group[-1][1] < LARGE_BYTES
            and begin - group[-1][2] <= MAX_GAP
            and end - group[0][1] <= BUFFER_BYTES - 2 * MAX_GAP  # with a page at both ends
        )
        if not fits and group:
            yield group
            group = []
        group.append(extent)
    if group:
        yield group
