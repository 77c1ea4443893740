"""PackedWriter: bytes that follow one another in a file, written in whole pages."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.io.file import File

LARGE_BYTES = 1 << 20  # of tensors that are written from where they are
BUFFER_BYTES = 4 << 20  # of small ones that are written together; each fits with a page around it
PIECE_BYTES = 32 << 20  # of large ones written at once; failures show after so much
HELD_BYTES = 256 << 20  # under way


class PackedWriter:
    """Writes large tensors from where they are, and packs small ones and odd ends into buffers.

    So every request but the last begins and ends on a page, and none is tiny because a tensor is.

    Args:
        engine: that writes.
        file: that is written, from its beginning.
        page: bytes, what requests are multiples of.
        held: bytes under way, HELD_BYTES if None.
    """

    def __init__(self, engine: AsyncIO, file: File, page: int, held: int | None = None) -> None:
        self._engine = engine
        self._file = file
        self._page = page
        self._window = Window(HELD_BYTES if held is None else held)
        self._position = 0  # in the file, of the next byte to come
        self._parts: list[Tensor] = []  # that are not written yet
        self._packed = 0  # their bytes
        self._free: list[Tensor] = []  # buffers

    def add(self, flat: Tensor) -> None:
        """Append bytes.

        Args:
            flat: (bytes,), uint8, contiguous, on any device; it must not change until `finish`.
        """
        total = flat.numel()
        if total < LARGE_BYTES:
            self._pack(flat)
            return
        start = -self._position % self._page
        end = start + (total - start) // self._page * self._page
        self._pack(flat[:start])
        self._flush()
        for begin in range(start, end, PIECE_BYTES):
            piece = flat[begin : min(begin + PIECE_BYTES, end)]
            future = self._engine.write(piece, self._file, self._position)
            self._position += piece.numel()
            self._window.add(future, piece.numel())
        self._pack(flat[end:])

    def finish(self) -> None:
        """Write what is left and wait for all."""
        self._flush()
        self._window.finish()

    def abandon(self) -> None:
        """Wait for what is under way; nothing, after `finish`."""
        self._window.abandon()

    def _pack(self, flat: Tensor) -> None:
        while flat.numel():
            part = flat[: BUFFER_BYTES - self._packed]
            self._parts.append(part)
            self._packed += part.numel()
            self._position += part.numel()
            if self._packed == BUFFER_BYTES:
                self._flush()
            flat = flat[part.numel() :]

    def _flush(self) -> None:
        if not self._parts:
            return
        buffer = self._free.pop() if self._free else new_pages(BUFFER_BYTES)
        packed = buffer[: self._packed]
        _join(self._parts, packed)
        future = self._engine.write(packed, self._file, self._position - self._packed)
        self._parts, self._packed = [], 0
        self._window.add(future, BUFFER_BYTES, then=partial(self._free.append, buffer))


def new_pages(nbytes: int) -> Tensor:
    """Return whole pages of fresh memory: (nbytes,), uint8."""
    return torch.frombuffer(native().Pages(nbytes), dtype=torch.uint8)


def _join(parts: Sequence[Tensor], out: Tensor) -> None:
    """Copy parts on any devices one after another into memory of the CPU."""
    begin = end = 0
    for i, part in enumerate(parts):
        end += part.numel()
        if i + 1 < len(parts) and parts[i + 1].device == part.device:
            continue
        group = parts[begin : i + 1]
        target = out[end - sum(member.numel() for member in group) : end]
        if part.is_cuda:
            target.copy_(torch.cat(list(group)))
        else:
            torch.cat(list(group), out=target)
        begin = i + 1
