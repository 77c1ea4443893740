"""aio_handle: the asynchronous I/O interface of older libraries, over AsyncIO."""

import errno
import os
import stat
import threading
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.engine.future import Future
from deepspeed_ext.io.engine.pinned import PinnedBuffer
from deepspeed_ext.io.owner import Owner
from deepspeed_ext.io.regular_file import kind_of
from deepspeed_ext.io.tensors import Memory, a, byte_view, plain

_FAMILIAR_ALIGNMENT = 512  # bytes, for each thread
_COMPARED_AT_ONCE = 64 << 20  # bytes
_LOCKED = "_deepspeed_ext_locked"  # of a storage: whether the kernel has locked its memory

FileName = str | os.PathLike[str] | int


class aio_handle(Owner):
    """Read and write tensors with the familiar calls.

    Existing code runs. What differs is what used to go wrong: a failure raises (it does not return
    -1 or end the process), any size, offset, address and strides are right, a file shorter than
    what is read raises, a new file gets the mode 0666 & ~umask, nothing is printed. A write still
    leaves what a longer file has behind it; AsyncIO can truncate.

    Every method takes a path or, for a file that is open already, its descriptor (as `filename` or
    as `fd`), which must stay open until the operation has completed. A tensor must keep its memory
    until then, as AsyncIO says. Any thread may call.

    Args:
        block_size: bytes of one request to the kernel.
        queue_depth: requests that the kernel has at once, for each thread.
        single_submit: accepted, without effect: requests always go to the kernel in batches.
        overlap_events: accepted, without effect: the queue is always kept full.
        num_threads: threads with a queue each.
        intra_op_parallelism: another name of num_threads, which it overrides.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        num_threads: int = 1,
        *,
        intra_op_parallelism: int | None = None,
    ) -> None:
        threads = num_threads if intra_op_parallelism is None else intra_op_parallelism
        self._engine = AsyncIO(block_size, queue_depth, threads)
        self._single_submit = single_submit
        self._overlap_events = overlap_events
        self._lock = threading.RLock()  # guards these two
        self._pending: dict[int, Future] = {}  # the oldest first
        self._completed = 0  # that no wait() has returned yet

    def get_block_size(self) -> int:
        """Return bytes of one request to the kernel."""
        return self._engine.block_size

    def get_queue_depth(self) -> int:
        """Return how many requests the kernel has at once, for each thread."""
        return self._engine.queue_depth

    def get_single_submit(self) -> bool:
        """Return what the constructor was given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return what the constructor was given."""
        return self._overlap_events

    def get_thread_count(self) -> int:
        """Return how many threads there are."""
        return self._engine.threads

    def get_intra_op_parallelism(self) -> int:
        """Return how many threads there are."""
        return self._engine.threads

    def get_alignment(self) -> int:
        """Return 512 bytes for each thread, to which existing code pads; nothing needs it here."""
        return _FAMILIAR_ALIGNMENT * self._engine.threads

    def read(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        validate: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Fill a tensor from a file, wait for it, and return 0.

        Args:
            buffer: any dtype, shape and strides, on the CPU or on CUDA.
            filename: path or descriptor.
            validate: read the file again and compare.
            file_offset: of the first byte in the file.

        Raises:
            OSError: it failed, or the comparison did.
        """
        self._begin(buffer, filename, fd, file_offset, write=False, validate=validate).result()
        return 0

    def write(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        validate: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Write a tensor into a file, wait for it, and return 0; all else as of read."""
        self._begin(buffer, filename, fd, file_offset, write=True, validate=validate).result()
        return 0

    def pread(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        validate: bool = False,
        async_: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Fill a tensor from a file: return 0 at once if async_, else what wait() returns.

        Other arguments as of read. What fails later raises in wait(), the comparison included.
        """
        return self._queue(
            *(buffer, filename, fd, file_offset), write=False, validate=validate, async_=async_
        )

    def pwrite(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        validate: bool = False,
        async_: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Write a tensor into a file: return 0 at once if async_, else what wait() returns.

        Other arguments as of read. The tensor must not change before wait() has returned.
        """
        return self._queue(
            *(buffer, filename, fd, file_offset), write=True, validate=validate, async_=async_
        )

    def sync_pread(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Fill a tensor from a file and return what wait() does: 1 if nothing else was queued."""
        return self._queue(buffer, filename, fd, file_offset, write=False, async_=False)

    def sync_pwrite(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Write a tensor into a file and return what wait() does: 1 if nothing else was queued."""
        return self._queue(buffer, filename, fd, file_offset, write=True, async_=False)

    def async_pread(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to fill a tensor from a file and return 0; wait() ends it."""
        return self._queue(buffer, filename, fd, file_offset, write=False, async_=True)

    def async_pwrite(
        self,
        buffer: Tensor,
        filename: FileName | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to write a tensor into a file and return 0; wait() ends it."""
        return self._queue(buffer, filename, fd, file_offset, write=True, async_=True)

    def wait(self) -> int:
        """Wait for all that is queued and return how many operations have completed since the last.

        Raises:
            OSError: the first failure, when all have ended. Further ones, and the number of those
                that completed, are for the next wait().
        """
        with self._lock:
            futures = dict(self._pending)
        for future in futures.values():
            future.wait()
        with self._lock:
            for key, future in futures.items():
                if self._pending.pop(key, None) is None:  # another thread has counted it
                    continue
                error = future.exception()
                if error is not None:
                    raise error
                self._completed += 1
            completed, self._completed = self._completed, 0
        return completed

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return num_elem uninitialised elements of the example's dtype in locked memory.

        Where the kernel refuses to lock them (`ulimit -l`), is_pinned() says so.
        """
        dtype = example_tensor.dtype
        buffer = PinnedBuffer(num_elem * dtype.itemsize)
        tensor = buffer.tensor(dtype, [num_elem])
        setattr(tensor.untyped_storage(), _LOCKED, buffer.pinned)  # views and other handles see it
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Forget a tensor of new_cpu_locked_tensor, of any handle; return whether it was one.

        The memory goes with its last tensor, so none is ever left without.
        """
        return vars(tensor.untyped_storage()).pop(_LOCKED, None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in locked memory of a handle or is pinned for CUDA."""
        locked: bool = getattr(tensor.untyped_storage(), _LOCKED, False)
        return locked or tensor.is_pinned()

    def _begin(
        self,
        buffer: Tensor,
        filename: FileName | None,
        fd: int | None,
        file_offset: int,
        *,
        write: bool,
        validate: bool,
    ) -> Future:
        file = _file(filename, fd)
        path = _path_of(file) if isinstance(file, int) else file
        memory = (Memory(buffer.detach()),) if validate else ()
        begin = self._engine.write if write else self._engine.read
        future = begin(buffer, path, file_offset)
        if not validate:
            return future
        compare = partial(_compare, self._engine, buffer, path, file_offset)
        return Future(future, buffer, compare, memory, f"validation of {os.fspath(path)!r}")

    def _queue(
        self,
        buffer: Tensor,
        filename: FileName | None,
        fd: int | None,
        file_offset: int,
        *,
        write: bool,
        validate: bool = False,
        async_: bool,
    ) -> int:
        future = self._begin(buffer, filename, fd, file_offset, write=write, validate=validate)
        with self._lock:
            self._pending[id(future)] = future
        return 0 if async_ else self.wait()


def _file(filename: FileName | None, fd: int | None) -> FileName:
    """Return the one of the two that was given."""
    if (filename is None) == (fd is None):
        raise TypeError(
            f"aio_handle: filename is {filename!r} and fd is {fd!r}, expected one of them"
        )
    if fd is None:
        assert filename is not None
        return filename
    if type(fd) is not int:
        raise TypeError(f"aio_handle: fd is {a(fd)}, expected an int")
    return fd


def _path_of(fd: int) -> str:
    """Return a path of what is open as a descriptor, which has to be a file."""
    if type(fd) is not int:
        raise TypeError(f"aio_handle: filename is {a(fd)}, expected a path or descriptor")
    try:
        mode = os.fstat(fd).st_mode
    except (OSError, OverflowError):
        raise OSError(
            errno.EBADF, f"aio_handle: fd is {fd}, which is not open, expected an open descriptor"
        ) from None
    kind = kind_of(mode)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"aio_handle: fd {fd} is {kind}, expected a file")
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode) or stat.S_ISCHR(mode)):
        raise OSError(errno.ESPIPE, f"aio_handle: fd {fd} is {kind}, expected a file")
    return f"/proc/self/fd/{fd}"


def _compare(engine: AsyncIO, tensor: Tensor, path: str | os.PathLike[str], offset: int) -> Tensor:
    """Read what was moved once more; return the tensor, or raise if it differs."""
    expected = byte_view(plain(tensor))
    memory = torch.empty(min(expected.numel(), _COMPARED_AT_ONCE), dtype=torch.uint8, device="cpu")
    for start in range(0, expected.numel(), _COMPARED_AT_ONCE):
        part = expected[start : start + _COMPARED_AT_ONCE].cpu()
        found = engine.read(memory[: part.numel()], path, offset + start).result()
        if not torch.equal(found, part):
            first = offset + start + int((found != part).nonzero()[0])
            raise OSError(
                errno.EIO,
                f"aio_handle: byte {first} of {os.fspath(path)} is another one than in the tensor, "
                f"expected {expected.numel()} equal bytes from offset {offset} on",
            )
    return tensor
