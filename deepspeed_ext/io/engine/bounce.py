"""Move tensors of devices to and from files: the thread that drives a Ring, and its callers."""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from deepspeed_ext.io.engine.pinned import PinnedBuffer
from deepspeed_ext.io.engine.ring import Copies, Ring, RingJob, Submit
from deepspeed_ext.io.extents import PAGE
from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.threads import AwaitedThread

RING_BYTES = 128 << 20
PIECE_BYTES = 16 << 20
_LINGER = 0.02  # seconds that the thread stays for more: to start one costs as much as a small read
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 1e-3  # seconds between two looks at what has completed
_LONGEST_COPY_PAUSE = 1e-4  # copies take less than a millisecond


class BounceTransfers:
    """Read and write contiguous tensors through pinned memory; any thread may call.

    A thread drives all transfers. It exists only while there are some, so nobody has to end it:
    Python waits for it at exit as for every thread, and what an abandoned engine began is finished.

    Args:
        submit: begins a transfer between host memory and a file.
        copies: what the devices do.
        register: tells the engine about memory of many transfers and returns a number; or None.
        unregister: takes that number; must not refer to the owner of this object.
        ring_bytes: pinned memory, allocated for the first transfer.
        piece_bytes: longest part of a transfer that is copied or submitted at once.

    Raises:
        ValueError: a size is no multiple of the page, or the ring is shorter than a piece.
    """

    def __init__(
        self,
        submit: Submit,
        copies: Copies,
        register: Callable[[int, int], int] | None = None,
        unregister: Callable[[int], object] | None = None,
        ring_bytes: int = RING_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        for name, value, least in (
            ("piece_bytes", piece_bytes, PAGE),
            ("ring_bytes", ring_bytes, piece_bytes),
        ):
            if value < least or value % PAGE:
                raise ValueError(
                    f"AsyncIO: {name} is {value}, expected a multiple of {PAGE}, at least {least}"
                )
        self._submit = submit
        self._copies = copies
        self._register = register
        self._unregister = unregister
        self._ring_bytes = ring_bytes
        self._piece_bytes = piece_bytes
        self._process = os.getpid()
        self._wake = threading.Condition()  # guards the rest
        self._ring: Ring | None = None  # used by the thread alone
        self._new: list[RingJob] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def read(self, tensor: Tensor, target: Any, offset: int, owner: object = None) -> RingJob:
        """Begin to fill a tensor from a file, after what the current stream does with it now.

        Args:
            tensor: contiguous; stays as it is until the job is done or has failed half-way.
            target: path or open file.
            offset: in the file.
            owner: who calls close(); lives as long as the transfer, so that no garbage collection
                ends it meanwhile, perhaps in the thread that it would wait for.

        Raises:
            RuntimeError: this is closed, or was made in another process.
        """
        return self._start(tensor, target, offset, owner, write=False)

    def write(
        self,
        tensor: Tensor,
        target: Any,
        offset: int,
        owner: object = None,
        *,
        truncate: bool = False,
    ) -> RingJob:
        """Begin to write a tensor with the values that the current stream has given it by now.

        Args:
            tensor: contiguous; must not change until the job is done.
            target: path or open file.
            offset: in the file.
            owner: as of read.
            truncate: whether the file shall end where this ends.

        Raises:
            RuntimeError: this is closed, or was made in another process.
        """
        return self._start(tensor, target, offset, owner, write=True, truncate=truncate)

    def close(self) -> None:
        """Wait for all transfers and free the ring; does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is threading.current_thread():
            return  # a garbage collection calls from there; the ring goes with this object
        if thread is not None:
            thread.join()
        self._ring = None

    def _start(
        self,
        tensor: Tensor,
        target: Any,
        offset: int,
        owner: object,
        *,
        write: bool,
        truncate: bool = False,
    ) -> RingJob:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"AsyncIO: engine is used in process {os.getpid()}, expected process "
                f"{self._process}, which made it; make another one after fork"
            )
        ready = self._copies.mark(tensor)
        job = RingJob(tensor, target, offset, ready, owner, write=write, truncate=truncate)
        with self._wake:
            if self._closed:
                raise RuntimeError("AsyncIO: engine is closed, expected an open one")
            if self._ring is None:
                self._ring = self._make_ring()
            if self._thread is None:
                thread = AwaitedThread(self._run, "deepspeed_ext-transfers")
                thread.start()  # comes as far as the lock; if Ctrl-C gets in here, it ends there
                self._thread = thread
            self._new.append(job)
            self._wake.notify_all()
        return job

    def _make_ring(self) -> Ring:
        buffer = PinnedBuffer(self._ring_bytes)
        if self._register is not None and self._unregister is not None:
            token = self._register(buffer.address, buffer.nbytes)
            buffer._at_release(partial(self._unregister, token))
        return Ring(buffer.tensor(), self._piece_bytes, self._submit, self._copies)

    def _run(self) -> None:
        """Drive the ring until there has been nothing to do for a while."""
        pause = _SHORTEST_PAUSE
        try:
            while (ring := self._with_new_jobs()) is not None:
                if ring.step():
                    pause = _SHORTEST_PAUSE
                elif ring.busy:
                    self._pause(ring, pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except BaseException as error:  # a fault of ours: nobody shall wait for ever
            logger.exception("AsyncIO: transfers of devices have stopped")
            self._give_up(error)

    def _with_new_jobs(self) -> Ring | None:
        """Give the ring what has come since; None when the thread shall end."""
        with self._wake:
            if self._ring is None or self._thread is not threading.current_thread():
                return None
            if not self._ring.busy:
                self._wake.wait_for(lambda: self._new or self._closed, _LINGER)
                if not self._new:
                    self._thread = None
                    return None
            for job in self._new:
                self._ring.add(job)
            self._new.clear()
            return self._ring

    def _pause(self, ring: Ring, seconds: float) -> None:
        """Sleep until something has probably completed, or a job has come."""
        if ring.copying:
            seconds = min(seconds, _LONGEST_COPY_PAUSE)
        request = ring.oldest_request
        if request is not None:
            request.wait(seconds)
        else:
            with self._wake:
                self._wake.wait_for(lambda: self._new, seconds)

    def _give_up(self, error: BaseException) -> None:
        with self._wake:
            self._closed = True
            self._thread = None
            assert self._ring is not None
            for job in self._new:
                self._ring.add(job)
            self._new.clear()
            self._ring.drain(error)
