"""A ring of host memory through which pieces of transfers travel between a device and files.

A piece of a write is copied into the ring, then written; one of a read is read into the ring, then
copied out. While one piece is copied others are read or written, so the slower of link and disk is
always busy. Nothing here waits or locks: a Ring belongs to one thread, which calls step().
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.future import Job, Mailbox
from deepspeed_ext.io.extents import PAGE, Extent, Extents
from deepspeed_ext.io.tensors import Memory, byte_view

_MOST_PIECES = 512  # in flight, since each step looks at all of them
_MOST_UNREADY = 32  # jobs that a step asks, and finds that their devices are still at work


class Submit(Protocol):
    """Begin a transfer between host memory and a file."""

    def __call__(
        self, target: Any, address: int, nbytes: int, offset: int, /, *, write: bool, truncate: bool
    ) -> Job: ...


class Mark(Protocol):
    """A point in the work of a device; a torch.cuda.Event is one."""

    def query(self) -> bool: ...


class Copies(Protocol):
    """What a device does for transfers."""

    def mark(self, tensor: Tensor) -> Mark:
        """Return the point behind all that the calling thread has queued where the tensor is."""

    def copy(self, destination: Tensor, source: Tensor) -> Mark:
        """Begin to copy bytes, of which one side is in the ring; return the point behind that."""


class RingJob:
    """The transfer of one contiguous tensor, from the call to its last byte, as a Future waits.

    Args:
        tensor: is kept alive until the job is done.
        target: path or open file.
        offset: in the file.
        ready: when the tensor may be touched.
        owner: is kept alive until the job is done.
        write: or read.
        truncate: whether the file shall end where a write ends.
    """

    def __init__(
        self,
        tensor: Tensor,
        target: Any,
        offset: int,
        ready: Mark,
        owner: object = None,
        *,
        write: bool,
        truncate: bool = False,
    ) -> None:
        self.write = write
        self.memory: Memory | None = Memory(tensor)
        self.target = target
        self.offset = offset
        self.truncate = truncate
        self.nbytes = tensor.numel() * tensor.element_size()
        self.ready: Mark | None = ready
        self.owner: object = owner
        self.bytes: Tensor | None = None  # the tensor as bytes, once it may be touched
        self.cut = 0  # bytes that pieces have been cut of
        self.is_cut = False  # no more pieces will come
        self.in_flight = 0  # pieces
        self.error: BaseException | None = None
        self._failed_at = 0  # where in the tensor
        self._guard = threading.RLock()  # of what cancel and tell meet the ring in
        self._begun = False
        self._told: list[tuple[Mailbox, int]] = []  # when it is done
        self._done = threading.Event()
        self._process = os.getpid()

    def wait(self, seconds: float) -> bool:
        """Return whether it is done, at the latest after these seconds."""
        if os.getpid() != self._process and not self.done():
            raise RuntimeError(
                f"AsyncIO: a transfer is waited for in process {os.getpid()}, expected process "
                f"{self._process}, which began it"
            )
        return self._done.wait(seconds)

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._done.is_set()

    def check(self) -> None:
        """Raise what made it fail."""
        if self.error is not None:
            raise self.error

    def begun(self) -> bool:
        """Return whether it is too late for cancel()."""
        return self._begun

    def begin(self) -> bool:
        """Make it too late for cancel(); return whether that was in time."""
        with self._guard:
            self._begun = not self.is_cut
            return self._begun

    def cancel(self) -> bool:
        """Take it back, which ends it, unless the ring has begun it; return whether it did."""
        with self._guard:
            if self._begun or self.is_cut:
                return False
            self.is_cut = True
        self.complete_if_done()
        return True

    def tell(self, mailbox: Mailbox, number: int) -> None:
        """Put the number there once it is done, be it now."""
        with self._guard:
            if not self.done():
                self._told.append((mailbox, number))
                return
        mailbox.put(number)

    def fail(self, error: BaseException, start: int = 0) -> None:
        """Keep the error nearest to the front; what is in flight comes back, but no more begins."""
        if self.error is None or start < self._failed_at:
            self.error, self._failed_at = error, start
        self.is_cut = True

    def complete_if_done(self) -> None:
        """Let go of everything, and tell who waits, after the last piece."""
        if self.is_cut and self.in_flight == 0:
            self.memory = self.bytes = self.target = self.ready = None
            with self._guard:
                self._done.set()
                told, self._told = self._told, []
            for mailbox, number in told:
                mailbox.put(number)
            self.owner = None  # may end it, which waits for its jobs


class _Piece:
    """Some bytes of a job, with their place in the ring."""

    def __init__(self, job: RingJob, nbytes: int, extent: Extent | None) -> None:
        self.job = job
        self.start = job.cut  # in the tensor
        self.nbytes = nbytes
        self.extent = extent
        # Where the memory is as far into a page as the file is, all of it can travel directly.
        self.place = extent.offset + self.offset % PAGE if extent else 0
        self.copied: Mark | None = None
        self.request: Job | None = None

    @property
    def offset(self) -> int:
        """In the file."""
        return self.job.offset + self.start

    def of_tensor(self) -> Tensor:
        """Return the bytes on the device."""
        assert self.job.bytes is not None and self.job.memory is not None
        self.job.memory.check(f"the transfer at offset {self.job.offset}")
        return self.job.bytes[self.start : self.start + self.nbytes]


class Ring:
    """Take jobs through host memory, in the order they came as far as their tensors are ready.

    Args:
        memory: bytes, page-aligned, whole pages.
        piece_bytes: longest piece, whole pages, at most all of the memory.
        submit: between the ring and files.
        copies: between the ring and devices.
    """

    def __init__(self, memory: Tensor, piece_bytes: int, submit: Submit, copies: Copies) -> None:
        self._memory = memory
        self._piece_bytes = piece_bytes
        self._submit = submit
        self._copies = copies
        self._space = Extents()
        self._space.grow(memory.numel())
        self._waiting: deque[RingJob] = deque()  # those with pieces yet to begin
        self._copying: list[_Piece] = []
        self._moving: list[_Piece] = []  # between the ring and files

    def add(self, job: RingJob) -> None:
        """Take this job, too."""
        self._waiting.append(job)

    @property
    def busy(self) -> bool:
        """Whether there is any job that is not done."""
        return bool(self._waiting or self._copying or self._moving)

    @property
    def copying(self) -> bool:
        """Whether a device copies now."""
        return bool(self._copying)

    @property
    def oldest_request(self) -> Job | None:
        """What probably completes next, between ring and file."""
        return self._moving[0].request if self._moving else None

    def step(self) -> bool:
        """Take all that has completed one stage on, and begin what there is room for.

        Returns:
            Whether there was anything of that.
        """
        copied, self._copying = _split(self._copying, self._has_copied)
        moved, self._moving = _split(self._moving, self._has_moved)
        for piece in copied:
            self._after_copy(piece)
        for piece in moved:
            self._after_move(piece)
        return self._begin() or bool(copied or moved)

    def drain(self, error: BaseException) -> None:
        """Fail all jobs, when nothing in the memory is in flight any more."""
        for piece in self._moving:
            while piece.request and not piece.request.wait(1.0):
                pass
        jobs = [piece.job for piece in (*self._copying, *self._moving)]
        for job in (*jobs, *self._waiting):
            job.fail(error)
            job.in_flight = 0
            job.complete_if_done()
        self._copying, self._moving = [], []
        self._waiting.clear()

    def _has_copied(self, piece: _Piece) -> bool:
        try:
            return piece.copied is None or piece.copied.query()
        except Exception as error:  # the device is lost: nothing moves there any more
            piece.job.fail(error, piece.start)
            return True

    def _has_moved(self, piece: _Piece) -> bool:
        return piece.request is None or piece.request.done()

    def _after_copy(self, piece: _Piece) -> None:
        if piece.job.write and piece.job.error is None:
            self._move(piece)
        else:
            self._finish(piece)

    def _after_move(self, piece: _Piece) -> None:
        job = piece.job
        try:
            if piece.request is not None:
                piece.request.check()
        except Exception as error:
            job.fail(error, piece.start)
        if job.write or job.error is not None or piece.nbytes == 0:
            self._finish(piece)
        else:
            self._copy(piece)

    def _finish(self, piece: _Piece) -> None:
        if piece.extent is not None:
            self._space.give_back(piece.extent)
        piece.job.in_flight -= 1
        piece.job.complete_if_done()

    def _copy(self, piece: _Piece) -> None:
        place = slice(piece.place, piece.place + piece.nbytes)
        try:
            there, here = piece.of_tensor(), self._memory[place]
            copy = self._copies.copy
            piece.copied = copy(here, there) if piece.job.write else copy(there, here)
        except Exception as error:
            piece.job.fail(error, piece.start)
            self._finish(piece)
        else:
            self._copying.append(piece)

    def _move(self, piece: _Piece) -> None:
        job = piece.job
        is_last = piece.start + piece.nbytes == job.nbytes
        address = self._memory.data_ptr() + piece.place
        try:
            piece.request = self._submit(
                *(job.target, address, piece.nbytes, piece.offset),
                write=job.write,
                truncate=job.truncate and is_last,  # of any other piece it would cut the last
            )
        except Exception as error:
            job.fail(error, piece.start)
            self._finish(piece)
        else:
            self._moving.append(piece)

    def _begin(self) -> bool:
        """Cut pieces while there is room; the first job that finds none is the next to get it.

        Returns:
            Whether all pieces of some job have begun.
        """
        begun = False
        unready: list[RingJob] = []
        while self._waiting and len(unready) < _MOST_UNREADY:
            job = self._waiting.popleft()
            if not self._is_ready(job):
                unready.append(job)  # its device is at work, which shall not hold up the others
                continue
            if not self._cut_all(job):
                self._waiting.appendleft(job)
                break
            begun = True
            job.complete_if_done()
        self._waiting.extendleft(reversed(unready))
        return begun

    def _cut_all(self, job: RingJob) -> bool:
        """Begin the pieces of a job that are left; false when there is no more room."""
        while not job.is_cut:
            piece = self._cut(job)
            if piece is None:
                return False
            if job.write and piece.nbytes > 0:
                self._copy(piece)
            else:
                self._move(piece)
        return True

    def _is_ready(self, job: RingJob) -> bool:
        ready, memory = job.ready, job.memory
        if job.begun() or ready is None or memory is None:
            return True
        try:
            if not ready.query():
                return False
            if not job.begin():
                return True
            job.ready = None
            memory.check(f"the transfer at offset {job.offset}")
            job.bytes = byte_view(memory.tensor)
            if job.nbytes > self._longest(job):
                job.target = _opened(job)
        except Exception as error:
            job.fail(error)
        return True

    def _longest(self, job: RingJob) -> int:
        """Return how long the next piece may be: those behind begin at whole pages of the file."""
        return self._piece_bytes - (job.offset + job.cut) % self._piece_bytes

    def _cut(self, job: RingJob) -> _Piece | None:
        if len(self._copying) + len(self._moving) >= _MOST_PIECES:
            return None
        nbytes = min(job.nbytes - job.cut, self._longest(job))
        extent = None
        if nbytes > 0:
            extent = self._space.take((job.offset + job.cut) % PAGE + nbytes)
            if extent is None:
                return None
        piece = _Piece(job, nbytes, extent)
        job.cut += nbytes
        job.is_cut = job.cut == job.nbytes
        job.in_flight += 1
        return piece


def _split(
    pieces: list[_Piece], belongs_first: Callable[[_Piece], bool]
) -> tuple[list[_Piece], list[_Piece]]:
    parts: tuple[list[_Piece], list[_Piece]] = ([], [])
    for piece in pieces:
        parts[not belongs_first(piece)].append(piece)
    return parts


def _opened(job: RingJob) -> Any:
    """Open a path once for all pieces, so that they are of one file, and reserve its space."""
    if not isinstance(job.target, str | bytes):
        return job.target
    try:
        file = native().File(job.target, "write" if job.write else "read")
    except OSError:
        return job.target  # the first piece fails as well, and says all there is to say
    if job.write:
        with contextlib.suppress(OSError):  # likewise
            end, size = job.offset + job.nbytes, max(job.offset, file.size())
            if size < end:
                file.allocate(size, end - size)
    return file
