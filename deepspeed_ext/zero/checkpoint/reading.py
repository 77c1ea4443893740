"""Parts of chunks, read from the files of a checkpoint in blocks that are checked."""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.io import AsyncIO, PinnedBuffer
from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.io.file import File
from deepspeed_ext.io.store.checks import checksum_of
from deepspeed_ext.zero.checkpoint.manifest import BLOCK, Piece

_PIECE = 32 << 20  # bytes that are read at once
_HELD = 256 << 20  # bytes under way
_SMALL = 1 << 20  # bytes that get a buffer of their own


class Wanted(NamedTuple):
    """A part of a chunk that is to be read.

    Args:
        piece: where the chunk lies.
        shape: of the chunk.
        offsets: of the part in the chunk.
        into: gets it; of the shape of the part, and any dtype, device and strides.
        dtype: of the chunk.
        name: for the texts of errors.
    """

    piece: Piece
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    into: Tensor
    dtype: torch.dtype
    name: str


def read(folder: str, parts: Iterable[Wanted], engine: AsyncIO) -> None:
    """Read parts of chunks, each block that they touch checked.

    What lies in memory as in the file is read to its place, and checked there; the rest goes
    through buffers, pinned ones if it is for a GPU.

    Raises:
        OSError: a file cannot be read, or EBADMSG: a block is not what was written. What was to be
            read is undefined then.
    """
    ordered = sorted(parts, key=lambda part: (part.piece.file, part.piece.offset))
    buffers = _Buffers(any(part.into.is_cuda for part in ordered))
    window = Window(_HELD)
    files: dict[str, File] = {}
    with ExitStack() as stack:
        stack.callback(buffers.settle)
        for slab in (slab for part in ordered for slab in _slabs(part)):
            name = slab.part.piece.file
            if name not in files:
                opened = native().File(os.fsencode(os.path.join(folder, name)), "read")
                files[name] = stack.enter_context(closing(opened))
                stack.callback(window.abandon)  # before it is closed
            nbytes = slab.end - slab.begin
            memory = slab.into.view(torch.uint8) if slab.is_in_place else buffers.take(nbytes)
            offset = slab.part.piece.offset + slab.begin
            future = engine.read(memory[:nbytes], files[name], offset)
            window.add(future, nbytes, partial(_take, slab, memory, folder, buffers))
        window.finish()


class _Slab(NamedTuple):
    """Whole blocks of a chunk, and what is wanted of them.

    Args:
        part: to which it belongs.
        begin: of the first block, in bytes of the chunk.
        end: of the last one.
        into: gets what is wanted.
        of: returns that, of all elements of the blocks.
        is_in_place: all of the blocks is wanted, and can be read to where it is to be.
    """

    part: Wanted
    begin: int
    end: int
    into: Tensor
    of: Callable[[Tensor], Tensor]
    is_in_place: bool = False


def _slabs(part: Wanted) -> Iterator[_Slab]:
    if part.into.numel() == 0:
        return iter(())
    has_all_columns = part.into.shape[1:] == part.shape[1:]
    return _ranges(part) if has_all_columns and part.into.is_contiguous() else _rows(part)


def _ranges(part: Wanted) -> Iterator[_Slab]:
    """Cut what follows one another in the file and in memory; what shares a block stands alone."""
    flat, size = part.into.view(-1), part.dtype.itemsize
    row = part.piece.nbytes // part.shape[0] if part.shape else 0
    first = part.offsets[0] * row if part.shape else 0
    low, last = first, first + flat.numel() * size
    can_be_in_place = flat.device.type == "cpu" and flat.dtype == part.dtype
    while low < last:
        begin = _down(low)
        high = min(last, begin + (BLOCK if low > begin else _PIECE))
        if high < part.piece.nbytes and _down(high) > low:
            high = _down(high)
        end = min(_up(high), part.piece.nbytes)
        into = flat[(low - first) // size : (high - first) // size]
        of = partial(_range, begin=(low - begin) // size, end=(high - begin) // size)
        yield _Slab(part, begin, end, into, of, can_be_in_place and (low, high) == (begin, end))
        low = high


def _rows(part: Wanted) -> Iterator[_Slab]:
    """Cut into some rows each, of which some columns are wanted."""
    row = part.piece.nbytes // part.shape[0]
    step = max(1, _PIECE // row)
    for first in range(0, part.into.shape[0], step):
        into = part.into[first : first + step]
        low = (part.offsets[0] + first) * row
        begin, end = _down(low), min(_up(low + len(into) * row), part.piece.nbytes)
        of = partial(
            _columns, part=part, rows=len(into), begin=(low - begin) // part.dtype.itemsize
        )
        yield _Slab(part, begin, end, into, of)


def _range(elements: Tensor, begin: int, end: int) -> Tensor:
    return elements[begin:end]


def _columns(elements: Tensor, part: Wanted, rows: int, begin: int) -> Tensor:
    count = part.piece.nbytes // part.shape[0] // part.dtype.itemsize * rows
    found = elements[begin : begin + count].view(rows, *part.shape[1:])
    for dimension in range(1, found.dim()):
        found = found.narrow(dimension, part.offsets[dimension], part.into.shape[dimension])
    return found


def _take(slab: _Slab, memory: Tensor, folder: str, buffers: "_Buffers") -> None:
    """Check what was read, and copy what is wanted of it."""
    part, piece = slab.part, slab.part.piece
    read = memory[: slab.end - slab.begin]
    for i, block in enumerate(read.split(BLOCK), slab.begin // BLOCK):
        got = checksum_of(block)
        if got != piece.checksums[i]:
            raise OSError(
                errno.EBADMSG,
                f"zero.load: {part.name!r} in {os.path.join(folder, piece.file)} has crc32c"
                f" {got:08x}, expected {piece.checksums[i]:08x}: {block.numel()} bytes at offset"
                f" {piece.offset + i * BLOCK} are not what was saved",
            )
    if slab.is_in_place:
        return
    # To the device as it is: copy_ would make it contiguous, and of another dtype, on the host.
    elements = read.view(part.dtype).to(slab.into.device, non_blocking=True)
    slab.into.copy_(slab.of(elements))
    buffers.give(memory, slab.into.device)


class _Buffers:
    """Memory that is read into, again and again.

    Args:
        pinned: for copies to a GPU, which go on after `give`.
    """

    _NBYTES = _PIECE + 2 * BLOCK  # for what does not begin and end with a block

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._copied: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def take(self, nbytes: int) -> Tensor:
        """Return memory of the host, of so many bytes or more."""
        if nbytes <= _SMALL or nbytes > self._NBYTES:
            return _host_memory(nbytes)
        while self._copied and (len(self._copied) * _PIECE > _HELD or self._copied[0][0].query()):
            event, buffer = self._copied.popleft()
            event.synchronize()
            self._free.append(buffer)
        return self._free.pop() if self._free else self._new()

    def give(self, buffer: Tensor, device: torch.device) -> None:
        """Take memory back, from which a copy to this device may be under way."""
        if buffer.numel() != self._NBYTES:
            return
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append((event, buffer))
        else:
            self._free.append(buffer)

    def settle(self) -> None:
        """Wait for the copies that are under way."""
        while self._copied:
            self._copied.popleft()[0].synchronize()

    def _new(self) -> Tensor:
        if self._pinned:
            return PinnedBuffer(self._NBYTES).tensor()
        return _host_memory(self._NBYTES)


def _host_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _down(nbytes: int) -> int:
    return nbytes // BLOCK * BLOCK


def _up(nbytes: int) -> int:
    return _down(nbytes + BLOCK - 1)
