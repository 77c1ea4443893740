"""TensorStore: named tensors in a file, scratch or durable."""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.engine.future import Future, check_timeout
from deepspeed_ext.io.engine.in_flight import InFlight
from deepspeed_ext.io.file import File
from deepspeed_ext.io.owner import Owner
from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.io.store.checks import checksum_of, target_of, verified
from deepspeed_ext.io.store.durable import commit, open_durable
from deepspeed_ext.io.store.folder import StoreFolder
from deepspeed_ext.io.store.job import StoreJob
from deepspeed_ext.io.store.ledger import Ledger
from deepspeed_ext.io.store.manifest import TensorInfo
from deepspeed_ext.io.store.space import Space
from deepspeed_ext.io.tensors import Memory, check_kind, empty, is_plain, plain

_log = logging.getLogger("deepspeed_ext")


class TensorStore(Owner):
    """Keep named tensors on disk, in one file, as a dictionary does in memory.

    A scratch store is a file without a name: nothing is to be seen in the folder, two stores there
    never meet, and the kernel removes it with the process, however that ends. Tensors are not
    checksummed, and one that is put again with the same size is overwritten in place.

    A durable store is a folder with `data`, `manifest.json` and `store.lock`. What was put is there
    after `commit`, as a whole: after a crash at any moment the store opens with all that the last
    or the unfinished commit had, never with a mixture. Committed bytes are not overwritten before
    the next commit, so tensors that change need room for two. Every `get` is checked against the
    CRC-32C that was computed while the tensor was written. One process writes, or several read.

    Space is reserved before a byte is written, in pages of 4096 bytes, and freed parts of the file
    are used again before it grows; its free end is cut off when it is larger than what is in use.

    A put that fails while it is written leaves its name without content, whatever it had before: to
    get or to commit it raises that failure until it is put again or deleted. A durable store
    without a commit still has the committed content on disk. Any thread may call. After fork, the
    store is the parent's; a child opens its own.

    Args:
        path: of a scratch store, a folder that exists, on the disk to use; of a durable one, its
            own folder, which is made if its parent exists.
        durable: keep the tensors.
        engine: what moves the bytes, left open by `close`; None makes one and closes it.
        read_only: share a durable store with other readers; nothing is changed.

    Raises:
        BlockingIOError: another process writes the durable store, or reads it and this would write.
        FileNotFoundError: the folder, or for read_only the store, is not there; or a durable store
            has a manifest without data.
        OSError: EBADMSG: the manifest of a durable store is damaged; EMLINK: its data have another
            hard link, under which writing would change them too.
        ValueError: read_only without durable; path is empty.
    """

    _ended = True  # until there is something to end

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        durable: bool = False,
        engine: AsyncIO | None = None,
        read_only: bool = False,
    ) -> None:
        self._is_shown = False  # in memory, where a file that got shorter would be a signal
        if read_only and not durable:
            raise ValueError("TensorStore: read_only is True for scratch, expected durable=True")
        self.path = Path(path_text("TensorStore", path))
        self.durable = durable
        self.read_only = read_only
        self._process = os.getpid()
        self._folder = StoreFolder(self.path, read_only=read_only) if durable else None
        try:
            self._file, self._ledger = self._open()
            self._own_engine = engine is None
            self._engine = AsyncIO() if engine is None else engine
        except BaseException:  # which may outlive this call, and keep all that it has seen
            if self._folder is not None:
                self._folder.close()
            raise
        self._in_flight = InFlight("TensorStore")
        self._ending = threading.RLock()  # one commit or close at a time
        self._ended = False
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor under a name and wait for it; see `put_async`."""
        self.put_async(name, tensor).result()

    def get(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read the tensor of a name and wait for it; see `get_async`."""
        return self.get_async(name, out).result()

    def put_async(self, name: str, tensor: Tensor) -> Future:
        """Start to write a tensor under a name.

        The name has the new content from now on; `get` waits for it. A durable store computes the
        checksum here while the write is under way, for which it copies a CUDA tensor to the host.
        This waits for requests on the old content rather than making the file longer.

        Args:
            name: any text but the empty one.
            tensor: any dtype, shape and strides, on the CPU or on CUDA; it must not change until
                the Future is done.

        Returns:
            A Future of the tensor.

        Raises:
            OSError: ENOSPC: there is no space; the name keeps what it has.
            TypeError: the tensor is sparse, quantized, on another device or none at all.
            ValueError: the name is empty.
        """
        self._check_writable("put")
        if not isinstance(name, str):
            raise TypeError(f"TensorStore.put: name is {type(name).__name__}, expected str")
        if not name:
            raise ValueError("TensorStore.put: name is '', expected some text")
        tensor = check_kind("TensorStore.put: tensor", tensor)
        memory = plain(tensor.detach().cpu()) if self.durable else tensor
        nbytes = tensor.numel() * tensor.element_size()
        info = TensorInfo(tensor.dtype, tuple(tensor.shape), nbytes)
        job = self._ledger.job(name, "put")
        transfer = None
        try:
            self._ledger.begin_put(job, info)
            if nbytes:
                transfer = self._engine.write(memory, self._file, job.record.offset)
            if self.durable:
                job.record.info = replace(info, checksum=checksum_of(memory))
            job.start(transfer)
            return self._future(job, tensor, None)
        except BaseException as error:  # Ctrl-C, wherever it came
            self._ledger.abandon(job, transfer, error)
            raise

    def get_async(self, name: str, out: Tensor | None = None) -> Future:
        """Start to read the tensor of a name; waits for a put of it that is under way.

        Args:
            name: a name that has content.
            out: filled and returned; any strides, on the CPU or on CUDA. None: a new CPU tensor.

        Returns:
            A Future of the tensor. Its content is undefined until that is done, and when it failed.
            Of a durable store it fails with OSError EBADMSG when the checksum is wrong.

        Raises:
            KeyError: there is no such name.
            OSError: the last put of it failed.
            TypeError: out is not a dense tensor.
            ValueError: out has another dtype or shape, or overlaps itself.
        """
        self._check_process()
        job = self._ledger.job(name, "get")
        transfer = None
        try:
            before = self._ledger.begin_get(job)
            tensor = target_of(name, job.record.info, out)
            if before is not None:
                before.wait()
                before.check()
            landing = tensor
            if self.durable and not (tensor.device.type == "cpu" and is_plain(tensor)):
                landing = empty(tensor.shape, tensor.dtype)
            if tensor.numel():
                transfer = self._engine.read(landing, self._file, job.record.offset)
            verify = partial(verified, job.record, self._file.path, landing, tensor)
            job.start(transfer)
            return self._future(job, tensor, verify if self.durable else None)
        except BaseException as error:
            self._ledger.abandon(job, transfer, error)
            raise

    def delete(self, name: str) -> None:
        """Forget a name; reads of it that are under way still end well.

        Raises:
            KeyError: there is no such name.
        """
        self._check_writable("delete")
        self._ledger.delete(name)

    def __contains__(self, name: object) -> bool:
        self._check_process()
        return self._ledger.has(name)

    def __len__(self) -> int:
        return len(self.names())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return the names that have content, the oldest first."""
        self._check_process()
        return self._ledger.names()

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, nbytes and checksum (of a durable store) of a tensor.

        Raises:
            KeyError: there is no such name.
            OSError: the last put of it failed.
        """
        self._check_process()
        return self._ledger.info(name)

    def show(self, name: str, view: Any, begin: int, nbytes: int, at: int = 0) -> None:
        """Let a part of memory be what a tensor is now, in whole pages and without a copy.

        Nothing is read before it is touched. It is to be done anew when the name is put again.

        Args:
            name: of the tensor.
            view: the memory, of the native class FileMap.
            begin: where in that.
            nbytes: how many bytes.
            at: where they are in the tensor.

        Raises:
            KeyError: there is no such name.
            OSError: the system refuses; or the last put of the name failed.
        """
        self._check_process()
        self._is_shown = True
        view.show(begin, nbytes, self._file, self._ledger.offset_of(name) + at)

    def reserve(self, nbytes: int, in_parts: bool = False) -> None:
        """Have room in the file for new tensors, so that a long job finds out before it starts.

        Args:
            nbytes: of all of them, each rounded up to 4096. Tensors of a durable store that will be
                put again count twice. The file does not get shorter than it is then.
            in_parts: the room may be scattered: enough for tensors like those that there were, not
                for any others.

        Raises:
            OSError: ENOSPC: the disk has less; nothing was changed.
        """
        self._check_writable("reserve")
        if type(nbytes) is not int or nbytes < 0:
            raise ValueError(f"TensorStore.reserve: nbytes is {nbytes!r}, expected 0 or more")
        self._ledger.reserve(nbytes, in_parts)

    def commit(self) -> None:
        """Bring all that was put and deleted so far to the disk, as a whole.

        Returns when the disk has it. If it raises, the disk has the last commit or, when the very
        end of it failed, perhaps this one; both stay whole until a commit succeeds.

        Raises:
            OSError: a put failed, or the disk; ESTALE: folder, data or lock were removed, moved or
                replaced under this store, and nothing was committed. After a failed fsync,
                all names that were put since the last commit are without content.
            RuntimeError: the store is scratch or read_only.
        """
        self._check_writable("commit")
        if self._folder is None:
            raise RuntimeError("TensorStore: commit of a scratch store, expected durable=True")
        with self._ending:
            commit(self._folder, self._file, self._ledger)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all that is under way.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            How many requests have ended since the last wait.

        Raises:
            TimeoutError: some are still under way; they go on.
            OSError: the first failure that no Future has been asked about, after all have ended.
        """
        self._check_process()
        check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        if not self._ledger.settle_abandoned(timeout):
            raise TimeoutError(
                f"TensorStore: a request that was given up is under way after {timeout} s, expected"
                " its end; it goes on"
            )
        return self._in_flight.wait(None if end is None else max(end - time.monotonic(), 0.0))

    def stats(self) -> dict[str, int]:
        """Return tensors, in_flight, and file_bytes = used_bytes + free_bytes, disk_free_bytes."""
        self._check_process()
        return self._ledger.stats()

    def close(self) -> None:
        """Wait for what is under way and close the store; more calls do nothing.

        What a durable store has not committed is gone, like all of a scratch store.

        Raises:
            OSError: the first failure that no Future has been asked about; the store is closed.
        """
        if os.getpid() != self._process:
            return
        with self._ending:
            if self._ended:
                return
            self._ledger.close()
            self._ledger.drain()
            self._ended = True
            try:
                self._in_flight.wait(None)
            finally:
                if not (self.read_only or self._is_shown):
                    # Also of a scratch file, so that no descriptor of it anywhere keeps the space.
                    self._ledger.give_back()
                self._file.close()
                if self._own_engine:
                    self._engine.close()
                if self._folder is not None:
                    self._folder.close()

    @property
    def closed(self) -> bool:
        """Whether close() was called, or this is a fork of the process that opened it."""
        return self._ended or os.getpid() != self._process

    def __enter__(self) -> "TensorStore":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Commit a durable store unless the block has failed, and close."""
        try:
            try:
                if error is None and self.durable and not self.read_only and not self._ended:
                    self.commit()
            finally:
                self.close()
        except OSError:
            if error is None:  # otherwise that one matters more
                raise
            _log.warning("TensorStore: a request failed too", exc_info=True)

    def __del__(self) -> None:
        if self._ended or sys is None or sys.is_finalizing():  # a module that is gone is None
            return
        try:
            self.close()
        except Exception as failure:  # also of what Ctrl-C has given up
            _log.error("TensorStore: a request failed and nobody asked for it: %s", failure)

    def _open(self) -> tuple[File, Ledger]:
        if self._folder is None:
            scratch: File = native().File.scratch(os.fspath(self.path))
            return scratch, Ledger(str(self.path), Space(scratch))
        file, extents, committed = open_durable(self._folder)
        return file, Ledger(str(self.path), Space(file, extents), committed)

    def _future(self, job: StoreJob, tensor: Tensor, finish: Callable[[], Tensor] | None) -> Future:
        what = f"{job.verb} of {job.name!r}"
        memory = () if finish is None else (Memory(tensor.detach()),)
        future = Future(job, tensor, finish, memory, what)
        self._in_flight.add(future)
        return future

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"TensorStore: {self.path} is used in process {os.getpid()}, expected process"
                f" {self._process}, which opened it; open another one after fork"
            )

    def _check_writable(self, verb: str) -> None:
        self._check_process()
        if self.read_only:
            raise RuntimeError(
                f"TensorStore: {verb} in {self.path}, which is open with read_only=True,"
                " expected read_only=False"
            )


def _leave_to_parent(reference: "weakref.ref[TensorStore]") -> None:
    """Close what a forked child has of a store: it would keep the lock, and a scratch file."""
    store = reference()
    if store is not None and not store._ended:
        store._file.abandon()  # now, also where a request holds it that only the parent can end
        if store._folder is not None:
            store._folder.close()
