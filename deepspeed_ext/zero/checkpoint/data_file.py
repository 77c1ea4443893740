"""The bytes of one process: a safetensors file, written in one go, with checksums of its blocks."""

import mmap
import os
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.format import make_header
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import lay_out
from deepspeed_ext.io.store.checks import checksum_of
from deepspeed_ext.io.tensors import byte_view, plain
from deepspeed_ext.zero.checkpoint.manifest import BLOCK, Piece

_HELD_PARTS = 64 << 20


def write(
    path: str,
    tensors: Mapping[str, Tensor],
    engine: AsyncIO,
    read: Callable[[str], Iterable[Tensor]] | None = None,
) -> dict[str, Piece]:
    """Write tensors into a new file, which stands under its name when it is on the disk.

    Those on a device come to the host one by one.

    Args:
        path: of the file, whose folder exists.
        tensors: by name; they must not change meanwhile.
        engine: that writes.
        read: returns the tensor of a name in parts that follow one another, where `tensors` has
            them on meta.

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
        # What is under way is memory of its own where it is made part by part.
        writer = PackedWriter(engine, new.file, page, None if read is None else _HELD_PARTS)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name, entry in entries.items():
                nbytes, checksums = entry.end - entry.begin, _Checksums()
                for part in [tensors[name]] if read is None else read(name):
                    content = byte_view(plain(part).cpu())
                    writer.add(content)
                    checksums.add(content)
                assert checksums.nbytes == nbytes
                place = len(header) + entry.begin
                pieces[name] = Piece(os.path.basename(path), place, nbytes, checksums.of_blocks())
            writer.finish()
        finally:
            writer.abandon()
        new.publish()
    return pieces


class _Checksums:
    """The checksums of the blocks of a tensor whose parts come one by one."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._found: list[int] = []

    def add(self, content: Tensor) -> None:
        """Take the next bytes."""
        while content.numel():
            inside = self.nbytes % BLOCK
            if not inside:
                self._found.append(0)
            part = content[: BLOCK - inside]
            self._found[-1] = checksum_of(part, self._found[-1])
            self.nbytes += part.numel()
            content = content[part.numel() :]

    def of_blocks(self) -> tuple[int, ...]:
        """Return them, in their order."""
        return tuple(self._found)
