"""NeighbourReader: tensors that lie side by side in one file, read at once into shared memory."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.fresh_pages import FreshPages
from deepspeed_ext.io.checkpoint.grouped_reader import MAX_GAP, Span
from deepspeed_ext.io.checkpoint.packed_writer import HELD_BYTES, PIECE_BYTES
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.io.file import File

BESIDE_BYTES = MAX_GAP + (8 << 10)  # that may be read with a tensor: a gap, and parts of two pages


class ReusedPages:
    """Memory of the CPU that is given again and again.

    Fresh memory costs more than a fast disk: each page is mapped, cleared, and given back.

    Args:
        nbytes: of it. Where that is not enough fresh memory is given.
    """

    def __init__(self, nbytes: int) -> None:
        self._fresh, self._nbytes = FreshPages(), nbytes
        self._memory: Tensor | None = None
        self._used = 0

    def give_again(self) -> None:
        """Give from the beginning again: what was given is overwritten from now on."""
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        """Return memory that begins on a page, and whose bytes are undefined."""
        if self._used + nbytes > self._nbytes:
            return torch.frombuffer(self._fresh.take(nbytes), dtype=torch.uint8)
        if self._memory is None:
            self._memory = torch.frombuffer(self._fresh.take(self._nbytes), dtype=torch.uint8)
        part = self._memory[self._used : self._used + nbytes]
        self._used = min(-(-(self._used + nbytes) // _PAGE) * _PAGE, self._nbytes)
        return part


_PAGE = 4096
_CPU = torch.device("cpu")


class NeighbourReader:
    """Reads tensors as bytes, those that lie side by side with one request.

    Each begins where it does in the pages of the file, so that no request of the CPU needs a copy.

    Args:
        engine: that reads.
        file: that is read.
        device: where the tensors are to be, cpu or cuda.
        pages: memory of the CPU.
        on_host: the names of tensors that are to be on the CPU all the same.
    """

    def __init__(
        self,
        engine: AsyncIO,
        file: File,
        device: torch.device,
        pages: ReusedPages,
        on_host: Collection[str] = (),
    ) -> None:
        self._engine, self._file, self._device = engine, file, device
        self._pages, self._on_host = pages, on_host
        self._page = max(file.offset_alignment, 1)
        self._end = file.size()
        self._window = Window(HELD_BYTES)

    def read(self, spans: Iterable[Span]) -> dict[str, Tensor]:
        """Return the bytes of each: (bytes,), uint8.

        Args:
            spans: in any order; none is empty.
        """
        tensors: dict[str, Tensor] = {}
        in_order = sorted(spans, key=lambda span: span.begin)
        apart = [span for span in in_order if span.name in self._on_host]
        rest = [span for span in in_order if span.name not in self._on_host]
        for group in _neighbours(apart):  # the small ones first: others do not wait for them
            tensors.update(self._begin(group, _CPU))
        for group in _neighbours(rest):
            tensors.update(self._begin(group, self._device))
        self._window.finish()
        return tensors

    def abandon(self) -> None:
        """Wait for what is under way; nothing, after `read`."""
        self._window.abandon()

    def _begin(self, group: Sequence[Span], device: torch.device) -> dict[str, Tensor]:
        """Begin to read neighbours; return where each will be."""
        first = group[0].begin // self._page * self._page
        last = -(-group[-1].end // self._page) * self._page
        memory = self._memory(min(last, self._end) - first, device)
        for start in range(0, memory.numel(), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            self._window.add(self._engine.read(piece, self._file, first + start), piece.numel())
        return {name: memory[begin - first : end - first] for name, begin, end in group}

    def _memory(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._pages.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _neighbours(spans: Iterable[Span]) -> Iterator[Sequence[Span]]:
    """Cut what is sorted by place where much lies between."""
    group: list[Span] = []
    for span in spans:
        if group and span.begin - group[-1].end > MAX_GAP:
            yield group
            group = []
        group.append(span)
    if group:
        yield group
