"""Host memory that is a file: where weights rest that are on a disk.

Parts of one file without a name are mapped. What is written to such memory is written to the file,
by the kernel, when it sees fit. The file has room for all of it before anything is mapped: where a
disk has none, a write to a mapping is a signal that ends the process.

What is streamed is not read through the mapping, which would be one fault after another in the
thread that asks, but from the file, by threads of an engine. They go through the page cache, though
they could go around it. That cache is what is mapped, so on every file system they read what was
written last; an optimizer that steps weights in place leaves them there, and finds there what
backward has just read. The kernel takes memory of the cache back where others want it.

A forked child has the weights of its parent, page by page as it first writes them; what it writes
is its own. It reads nothing from the file but through its memory.
"""

import os
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

from torch import Tensor

from deepspeed_ext.io import AsyncIO, Future
from deepspeed_ext.io.extents import Extent, Extents
from deepspeed_ext.io.file import File
from deepspeed_ext.io.file_map import file_map, scratch_file
from deepspeed_ext.offload.host_tensors import host_bytes, laid_out
from deepspeed_ext.zero.streaming.rest import OP, pinned_memory

_THREADS = 4  # of the engine: one copies less from the page cache than a link to a GPU takes


class _Part(NamedTuple):
    """Memory, and the part of the file that it is."""

    address: int
    nbytes: int
    extent: Extent


class ScratchMemory:
    """Memory that is parts of a scratch file; each goes when no tensor has it any more.

    Args:
        folder: on the disk to use.
        nbytes: to reserve there now, in whole pages.

    Raises:
        OSError: the folder is none to write in, or has not so much room.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        try:
            self._file = scratch_file(folder)
        except OSError as error:
            why = f"{OP}: nvme_path is {folder}, expected a folder to write in: {error.strerror}"
            raise OSError(error.errno, why) from error
        self._file.refuse_direct()
        self._folder = folder
        self._process = os.getpid()
        self._lock = RLock()  # garbage may be collected in the middle of all
        self._extents = Extents()
        self._parts: list[_Part] = []  # in the order of their addresses
        self._gone = deque[_Part]()
        self._views: weakref.WeakKeyDictionary[Any, tuple[File, int, int]]
        self._views = weakref.WeakKeyDictionary()
        self._grow(nbytes)
        self._engine = AsyncIO(threads=_THREADS)
        os.register_at_fork(after_in_child=partial(_leave_to_parent, self._views))

    def memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory in the shape, dtype and layout of each of these, in one part.

        Raises:
            OSError: the disk has not so much room.
        """
        nbytes = host_bytes(tensors)
        if nbytes == 0 or os.getpid() != self._process:
            return pinned_memory(tensors)
        return laid_out(tensors, self._take(nbytes))

    def offset_of(self, memory: Tensor) -> int | None:
        """Return where in the file memory is, if it is in this process; the caller has it."""
        if os.getpid() != self._process:
            return None
        begin = memory.data_ptr()
        with self._lock:
            self._settle()
            i = bisect_right(self._parts, begin, key=lambda part: part.address) - 1
            if i < 0 or begin + memory.nbytes > self._parts[i].address + self._parts[i].nbytes:
                return None
            return self._parts[i].extent.offset + begin - self._parts[i].address

    def has(self, memory: Tensor) -> bool:
        """Tell whether memory is in the file."""
        return self.offset_of(memory) is not None

    def read(self, memory: Tensor, offset: int) -> Future:
        """Begin to read a part of the file."""
        return self._engine.read(memory, self._file, offset)

    def close(self) -> None:
        """Read no more; memory stays what it is."""
        self._engine.close()

    def _take(self, nbytes: int) -> Tensor:
        with self._lock:
            self._settle()
            size = _in_kernel_pages(nbytes)
            self._grow(self._extents.missing(size))
            extent = self._extents.take(size)
            assert extent is not None  # it has grown
            try:
                view, memory = file_map(nbytes)
                view.show(0, nbytes, self._file, extent.offset, shared=True)
            except BaseException:
                self._extents.give_back(extent)
                raise
            part = _Part(memory.data_ptr(), nbytes, extent)
            insort(self._parts, part)
            self._views[view] = (self._file, extent.offset, nbytes)
            weakref.finalize(view, self._gone.append, part).atexit = False
            return memory

    def _grow(self, nbytes: int) -> None:
        end = self._extents.end
        try:
            _allocate(self._file, end, nbytes)
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            why = f"{OP}: nvme_path is {self._folder} with too little room: {error.strerror}"
            raise OSError(error.errno, why) from error
        self._extents.grow(nbytes)

    def _settle(self) -> None:
        """Let parts be used again that nobody has any more."""
        while self._gone:
            part = self._gone.popleft()
            self._parts.remove(part)
            self._extents.give_back(part.extent)


def _allocate(file: File, begin: int, nbytes: int) -> None:
    if nbytes <= 0:
        return
    file.allocate(begin, nbytes)
    if file.size() < begin + nbytes:  # a file system that cannot reserve: then it is to write
        os.posix_fallocate(file.fileno(), begin, nbytes)
        file.sync()  # or it may tell later that there is no room


def _leave_to_parent(views: "weakref.WeakKeyDictionary[Any, tuple[File, int, int]]") -> None:
    """Let a forked child write to memory of its own."""
    for view, (file, offset, nbytes) in list(views.items()):
        view.show(0, nbytes, file, offset)
    views.clear()  # a child of the child is to have what that has written


def reserved_bytes(parts: Sequence[Sequence[Tensor]]) -> int:
    """Return how much ScratchMemory is to reserve for tensors that come in these parts."""
    return sum(_in_kernel_pages(host_bytes(tensors)) for tensors in parts)


def _in_kernel_pages(nbytes: int) -> int:
    page = os.sysconf("SC_PAGESIZE")
    return -(-nbytes // page) * page
