"""GroupedReader: tensors that lie in one file, large ones alone, small neighbours together."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

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


class Span(NamedTuple):
    """Where the bytes of a tensor lie in the file."""

    name: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.end - self.begin


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

    def read(self, spans: Iterable[Span]) -> dict[str, Tensor]:
        """Return the bytes of each: (bytes,), uint8, with no others in their storage.

        Args:
            spans: in any order; none is empty.
        """
        for group in _groups(sorted(spans, key=lambda span: span.begin)):
            if len(group) > 1 or group[0].nbytes < LARGE_BYTES:
                self._read_small(group)
            elif self._device.type == "cpu":
                self._read_large(group[0])
            else:
                self._read_to_device(group[0])
        self._window.finish()
        return self._tensors

    def abandon(self) -> None:
        """Wait for what is under way; nothing, after `read`."""
        self._window.abandon()

    def _read_large(self, span: Span) -> None:
        first, last = self._outwards(span.begin, span.end)
        pages = self._pages.take(last - first)
        self._read_into(torch.frombuffer(pages, dtype=torch.uint8), first)
        self._tensors[span.name] = torch.frombuffer(  # whose storage is these bytes only
            pages, dtype=torch.uint8, count=span.nbytes, offset=span.begin - first
        )

    def _read_to_device(self, span: Span) -> None:
        memory = torch.empty(span.nbytes, dtype=torch.uint8, device=self._device)
        self._tensors[span.name] = memory
        self._read_into(memory, span.begin)

    def _read_into(self, memory: Tensor, offset: int) -> None:
        for start in range(0, memory.numel(), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            self._window.add(self._engine.read(piece, self._file, offset + start), piece.numel())

    def _read_small(self, group: Sequence[Span]) -> None:
        first, last = self._outwards(group[0].begin, group[-1].end)
        buffer = self._free.pop() if self._free else new_pages(BUFFER_BYTES)
        future = self._engine.read(buffer[: last - first], self._file, first)
        self._window.add(future, BUFFER_BYTES, partial(self._copy_out, group, buffer, first))

    def _copy_out(self, group: Sequence[Span], buffer: Tensor, first: int) -> None:
        bytes_ = buffer[: group[-1].end - first].to(self._device)
        for name, begin, end in group:
            self._tensors[name] = bytes_[begin - first : end - first].clone()
        self._free.append(buffer)

    def _outwards(self, begin: int, end: int) -> tuple[int, int]:
        """Return the whole pages of the file in which these bytes lie; the last one may be less."""
        last = (end + self._page - 1) // self._page * self._page
        return begin // self._page * self._page, min(last, self._end)


def _groups(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Cut what is sorted by place into what is read together: a large tensor, or small ones."""
    group: list[Span] = []
    for span in spans:
        fits = (
            group
            and span.nbytes < LARGE_BYTES
            and group[-1].nbytes < LARGE_BYTES
            and span.begin - group[-1].end <= MAX_GAP
            and span.end - group[0].begin <= BUFFER_BYTES - 2 * MAX_GAP  # with a page at both ends
        )
        if not fits and group:
            yield group
            group = []
        group.append(span)
    if group:
        yield group
