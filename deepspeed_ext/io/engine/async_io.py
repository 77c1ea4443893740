"""AsyncIO: tensors to files and back, while the caller does something else."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import Settings, backend_to_ask_for, check_sizes
from deepspeed_ext.io.engine.future import Future, Job
from deepspeed_ext.io.engine.in_flight import InFlight
from deepspeed_ext.io.file import File
from deepspeed_ext.io.owner import Owner
from deepspeed_ext.io.tensors import (
    Memory,
    a,
    as_bytes,
    check_kind,
    empty,
    is_plain,
    overlaps_itself,
    plain,
)

if TYPE_CHECKING:
    from deepspeed_ext.io.engine.cuda import CudaTransfers
    from deepspeed_ext.io.engine.pinned import PinnedBuffer

PathOrFile = str | os.PathLike[str] | File

_MOST = (1 << 63) - 1  # offset of the end of a file

_log = logging.getLogger("deepspeed_ext")


class AsyncIO(Owner):
    """An engine that moves tensors between memory and files.

    Many transfers may be under way at once, on one file too, as long as no two of them meet in the
    same bytes. Every byte is accounted for: a transfer ends well only when all of its bytes have
    moved, and a failure that nobody asked for is raised by `wait` and `close`.

    A tensor that is read or written may be dropped, or get other memory (`tensor.data =`, `set_`).
    Its storage must stay as it is until the Future is done: not freed, resized or moved by
    `untyped_storage().resize_`, `resize_` or `share_memory_`. FSDP does that to its parameters when
    it gathers and frees them, so transfer their shards (`DTensor.to_local()`), or wait in between.
    Where it happens all the same the Future fails with OSError EFAULT, but that is all: nothing
    stops a transfer from using the freed memory in the meantime, which may be somebody else's by
    then or end the process, and a storage that is given the same address again goes unnoticed.

    Where the file system allows it, whole pages travel directly between memory and the device, and
    what is left at both ends goes through the page cache; a tensor's address, its size and the
    offset may be anything. Any thread may call. After fork, a child needs an engine of its own.

    Args:
        block_size: bytes of one request to the kernel, 1 to 1 GiB.
        queue_depth: requests that the kernel has at once, for each thread.
        threads: threads with a queue each. One is enough for most devices.
        backend: "io_uring", "libaio" (the kernel's older interface) or "threads"; "auto" takes what
            the environment variable DS_EXT_AIO_BACKEND names, else the first that works here.

    Raises:
        ValueError: an argument is out of range.
        OSError: the kernel refuses the backend that was asked for.
    """

    def __init__(
        self,
        block_size: int = Settings.block_size,
        queue_depth: int = Settings.queue_depth,
        threads: int = Settings.threads,
        backend: str = Settings.backend,
    ) -> None:
        check_sizes(block_size=block_size, queue_depth=queue_depth, threads=threads)
        self.block_size = block_size
        self.queue_depth = queue_depth
        self.threads = threads
        asked = backend_to_ask_for(backend)
        self._engine = native().Engine(block_size, queue_depth, threads, asked)
        self.backend: str = self._engine.backend
        self._process = os.getpid()
        self._in_flight = InFlight("AsyncIO")
        self._cuda: list[CudaTransfers] = []  # none before the first CUDA tensor, then one
        self._lock = threading.Lock()
        self._closed = False
        self._at_end = weakref.finalize(
            self, _end_unattended, self._engine, self._cuda, self._in_flight, self._process
        )

    def read(self, tensor: Tensor, path: PathOrFile, offset: int = 0) -> Future:
        """Fill a tensor with the bytes of a file.

        Args:
            tensor: any dtype, shape and strides, on the CPU or on CUDA; elements must not share
                memory. Its bytes are undefined until the Future says that it is done.
            path: a file, or an open File.
            offset: of the first byte in the file.

        Returns:
            A Future of the tensor.

        Raises:
            TypeError: the tensor is sparse, quantized, on no such device or none at all.
            ValueError: the tensor overlaps itself, the offset is negative, the File is closed.
        """
        tensor = check_kind("AsyncIO.read: tensor", tensor)
        if overlaps_itself(tensor):
            raise ValueError(
                f"AsyncIO.read: tensor has shape {tuple(tensor.shape)} and strides"
                f" {tuple(tensor.stride())}, expected elements that do not overlap"
            )
        torch.autograd.graph.increment_version(tensor)
        if is_plain(tensor):
            # Detached: what the caller does to the tensor, such as `.data =`, leaves the memory.
            return self._start(Memory(tensor.detach()), tensor, path, offset, write=False)
        staged = empty(tensor.shape, tensor.dtype, tensor.device)
        home = Memory(tensor.detach())

        def unstage() -> Tensor:
            home.tensor.copy_(staged)
            return tensor

        return self._start(
            Memory(staged), tensor, path, offset, write=False, finish=unstage, home=home
        )

    def write(
        self, tensor: Tensor, path: PathOrFile, offset: int = 0, truncate: bool = False
    ) -> Future:
        """Write the bytes of a tensor into a file, which is made when there is none.

        Args:
            tensor: any dtype, shape and strides, on the CPU or on CUDA. It must not change until
                the Future is done.
            path: a file, or an open File.
            offset: of the first byte in the file. Nothing outside of these bytes is touched.
            truncate: cut the file off where this write ends.

        Returns:
            A Future of the tensor. When it is done the kernel has the bytes; they are sure to be on
            the disk after File.sync or os.fsync.

        Raises:
            TypeError: the tensor is sparse, quantized, on no such device or none at all.
            ValueError: the offset is negative, the File is closed.
        """
        tensor = check_kind("AsyncIO.write: tensor", tensor)
        memory = Memory(plain(tensor))
        return self._start(memory, tensor, path, offset, write=True, truncate=truncate)

    def register(self, buffer: "PinnedBuffer") -> None:
        """Tell the kernel once about memory that many transfers will use.

        With io_uring, transfers of tensors in this buffer then take less of the CPU. Where the
        kernel declines (its limit is `ulimit -l`), they work as before. Ends with the buffer.

        Args:
            buffer: locked memory.
        """
        self._check_process()
        token = self._engine.register(buffer.address, buffer.nbytes)
        engine = weakref.ref(self._engine)

        def unregister() -> None:
            if (alive := engine()) is not None:
                alive.unregister(token)

        buffer._at_release(unregister)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all that is in flight.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            How many transfers have ended since the last wait.

        Raises:
            TimeoutError: some are still under way; they go on.
            OSError: the first failure that no Future has been asked about, after all have ended.
        """
        self._check_process()
        return self._in_flight.wait(timeout)

    def stats(self) -> dict[str, int | str]:
        """Return what was done so far: requests, bytes, and how they travelled."""
        return {"backend": self.backend, **self._engine.stats()}

    def close(self) -> None:
        """Wait for all that is in flight, then end the threads; more calls do nothing.

        Raises:
            OSError: the first failure that no Future has been asked about.
        """
        if self._closed or os.getpid() != self._process:
            return
        failure: Exception | None = None
        try:
            self._in_flight.wait(None)
        except Exception as error:  # Ctrl-C is not one: then it is still open, and can be closed
            failure = error
        self._closed = True
        try:
            _end(self._engine, self._cuda, self._in_flight)
        except Exception as error:  # of what other threads began meanwhile
            if failure is not None:
                _log.error("AsyncIO: one more transfer failed: %s", error)
            failure = failure or error
        self._at_end.detach()
        if failure is not None:
            raise failure

    def __enter__(self) -> "AsyncIO":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # otherwise that one matters more
                raise
            _log.warning("AsyncIO: a transfer failed too", exc_info=True)

    def _start(
        self,
        memory: Memory,
        tensor: Tensor,
        path: PathOrFile,
        offset: int,
        *,
        write: bool,
        truncate: bool = False,
        finish: Callable[[], Tensor] | None = None,
        home: Memory | None = None,
    ) -> Future:
        """Submit contiguous `memory` on behalf of `tensor`; `finish` needs `home`."""
        self._check_process()
        if self._closed:
            raise RuntimeError("AsyncIO: engine is closed, expected an open one")
        op = "AsyncIO.write" if write else "AsyncIO.read"
        nbytes = memory.tensor.nbytes
        if type(offset) is not int:
            raise TypeError(f"{op}: offset is {a(offset)}, expected an int")
        if not 0 <= offset <= _MOST - nbytes:
            raise ValueError(f"{op}: offset is {offset}, expected 0 to 2^63 - 1 - {nbytes} bytes")
        target = _target(op, path)
        name = target.path if isinstance(target, native().File) else os.fsdecode(target)
        held = self._in_flight.hold(memory)
        try:
            job = self._submit(memory.tensor, target, offset, write=write, truncate=truncate)
        except Exception:  # it has not begun
            self._in_flight.release(held)
            raise
        what = f"{'write' if write else 'read'} at offset {offset} of {name}"
        used = (memory,) if home is None else (memory, home)
        future = Future(job, tensor, finish, used, what)
        self._in_flight.add(future)
        self._in_flight.release(held)
        if self._closed:  # meanwhile: close may have looked before this one was there
            _end_unattended(self._engine, self._cuda, self._in_flight, self._process)
        return future

    def _submit(
        self, memory: Tensor, target: Any, offset: int, *, write: bool, truncate: bool
    ) -> Job:
        job: Job
        if not memory.is_cuda:
            place = as_bytes(memory)
            job = self._engine.submit(target, *place, offset, write=write, truncate=truncate)
        elif write:
            transfers = self._cuda_transfers()
            job = transfers.write(memory, target, offset, truncate=truncate, owner=self)
        else:
            job = self._cuda_transfers().read(memory, target, offset, owner=self)
        return job

    def _cuda_transfers(self) -> "CudaTransfers":
        from deepspeed_ext.io.engine.cuda import CudaTransfers

        with self._lock:
            if not self._cuda:
                engine = self._engine
                self._cuda.append(CudaTransfers(engine.submit, engine.register, engine.unregister))
            return self._cuda[0]

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"AsyncIO: engine is used in process {os.getpid()}, expected process"
                f" {self._process}, which made it; make another one after fork"
            )


def _end(engine: Any, cuda: "list[CudaTransfers]", in_flight: InFlight) -> None:
    """Wait for all that is under way, end the threads, raise what nobody was told."""
    for transfers in cuda:
        transfers.close()
    engine.close()
    in_flight.release_all()
    in_flight.wait(None)


def _end_unattended(
    engine: Any, cuda: "list[CudaTransfers]", in_flight: InFlight, process: int
) -> None:
    """Do what close does for an AsyncIO that is dropped, or when Python ends."""
    if os.getpid() != process:
        return
    try:
        _end(engine, cuda, in_flight)
    except Exception as failure:
        _log.error("AsyncIO: a transfer failed and nobody asked for it: %s", failure)


def _target(op: str, path: PathOrFile) -> Any:
    """Return what the native engine takes: a File, or the bytes of a path."""
    if isinstance(path, native().File):
        return path
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"{op}: path is {a(path)}, expected a str, os.PathLike or File")
    if not name:  # which would become the working folder
        raise ValueError(f"{op}: path is '', expected the path of a file")
    if "\0" in name:
        raise ValueError(f"{op}: path is {name!r}, expected one without zero bytes")
    if not os.path.isabs(name):  # it is opened later, perhaps after a chdir
        name = os.path.join(os.getcwd(), name)
    return os.fsencode(name)
