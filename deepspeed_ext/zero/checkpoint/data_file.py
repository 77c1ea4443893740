"""The bytes of one process: a safetensors file, written in one go and read in checked blocks."""

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io._native import native
from deepspeed_ext.io.checkpoint.format import make_header
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import lay_out
from deepspeed_ext.io.engine.future import Future
from deepspeed_ext.io.file import File
from deepspeed_ext.io.store.checks import checksum_of
from deepspeed_ext.io.tensors import byte_view, plain
from deepspeed_ext.zero.checkpoint.manifest import BLOCK, Piece

_PIECE = 64 << 20  # bytes that are read at once
_AHEAD = 4  # such reads under way


def write(path: str, tensors: Mapping[str, Tensor], engine: AsyncIO) -> dict[str, Piece]:
    """Write tensors into a new file, which stands under its name when it is on the disk.

    Those on a device come to the host one by one.

    Args:
        path: of the file, whose folder exists.
        tensors: by name; they must not change meanwhile.
        engine: that writes.

    Returns:
        Where each lies.

    Raises:
        OSError: the disk is full, or the file cannot be written.
        TypeError: a tensor has a dtype that the safetensors format lacks.
    """
    pieces: dict[str, Piece] = {}
    try:
        entries = lay_out(tensors, mmap.PAGESIZE)
    except KeyError as error:
        raise TypeError(f"zero: a tensor has dtype {error}, expected one of safetensors") from None
    with NewFile(path) as new:
        page = max(mmap.PAGESIZE, new.file.offset_alignment)
        header = make_header(entries, {}, page)
        new.reserve(len(header) + max((entry.end for entry in entries.values()), default=0))
        writer = PackedWriter(engine, new.file, page)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name, entry in entries.items():
                content = byte_view(plain(tensors[name]).cpu())
                writer.add(content)
                checksums = tuple(checksum_of(block) for block in content.split(BLOCK))
                checksums = checksums if content.numel() else ()
                place = len(header) + entry.begin
                pieces[name] = Piece(os.path.basename(path), place, content.numel(), checksums)
            writer.finish()
        finally:
            writer.abandon()
        new.publish()
    return pieces


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

    Raises:
        OSError: a file cannot be read, or EBADMSG: a block is not what was written.
    """
    with ExitStack() as stack:
        files: dict[str, File] = {}
        under_way: deque[tuple[_Slab, Tensor, Future]] = deque()
        stack.callback(_await_all, under_way)
        for slab in _slabs(sorted(parts, key=lambda part: (part.piece.file, part.piece.offset))):
            name = slab.part.piece.file
            if name not in files:
                opened = native().File(os.fsencode(os.path.join(folder, name)), "read")
                files[name] = stack.enter_context(closing(opened))
                stack.callback(_await_all, under_way)  # before it is closed
            buffer = torch.empty(slab.end - slab.begin, dtype=torch.uint8)
            offset = slab.part.piece.offset + slab.begin
            under_way.append((slab, buffer, engine.read(buffer, files[name], offset)))
            if len(under_way) == _AHEAD:
                _take(*under_way.popleft(), folder)
        while under_way:
            _take(*under_way.popleft(), folder)


class _Slab(NamedTuple):
    """Some rows of a part, and the whole blocks of the chunk, in bytes, in which they lie."""

    part: Wanted
    first: int
    rows: int
    begin: int
    end: int


def _slabs(parts: Iterable[Wanted]) -> Iterator[_Slab]:
    for part in parts:
        if part.into.numel() == 0:
            continue
        if not part.shape:
            yield _Slab(part, 0, 1, 0, part.piece.nbytes)
            continue
        row = part.piece.nbytes // part.shape[0]
        step = max(1, _PIECE // row)
        for first in range(0, part.into.shape[0], step):
            rows = min(step, part.into.shape[0] - first)
            begin = (part.offsets[0] + first) * row // BLOCK * BLOCK
            end = -(-(part.offsets[0] + first + rows) * row // BLOCK) * BLOCK
            yield _Slab(part, first, rows, begin, min(end, part.piece.nbytes))


def _take(slab: _Slab, buffer: Tensor, future: Future, folder: str) -> None:
    """Check what was read, and copy what is wanted of it."""
    future.result()
    part, piece = slab.part, slab.part.piece
    for i, block in enumerate(buffer.split(BLOCK), slab.begin // BLOCK):
        got = checksum_of(block)
        if got != piece.checksums[i]:
            raise OSError(
                errno.EBADMSG,
                f"zero.load: {part.name!r} in {os.path.join(folder, piece.file)} has crc32c"
                f" {got:08x}, expected {piece.checksums[i]:08x}: {block.numel()} bytes at offset"
                f" {piece.offset + i * BLOCK} are not what was saved",
            )
    elements = buffer.view(part.dtype)
    if not part.shape:
        part.into.copy_(elements.view(()))
        return
    row = piece.nbytes // part.shape[0]
    begin = (part.offsets[0] + slab.first) * row - slab.begin
    rows = elements[begin // part.dtype.itemsize :][: slab.rows * row // part.dtype.itemsize]
    found = rows.view(slab.rows, *part.shape[1:])
    for dimension in range(1, found.dim()):
        found = found.narrow(dimension, part.offsets[dimension], part.into.shape[dimension])
    part.into[slab.first : slab.first + slab.rows].copy_(found)


def _await_all(under_way: deque[tuple[_Slab, Tensor, Future]]) -> None:
    while under_way:
        under_way.popleft()[2].exception()
