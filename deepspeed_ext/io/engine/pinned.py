"""Host memory of exact size that the kernel keeps in place: single buffers, and a pool with a
budget.

A buffer is locked in the best way there is: known to CUDA, if this process uses CUDA already, so
that copies to and from devices are asynchronous; else mlock. Where neither is allowed it is
ordinary memory, which says so.
"""

import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.owner import Owner
from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.torch_internals.processes import has_cuda_context

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class PinnedBuffer(Owner):
    """Allocate page-aligned host memory, locked where possible.

    Nothing here makes a CUDA context. The memory is registered with CUDA when CUDA is initialised
    in this process (torch does that on its first use; `torch.cuda.init()` does it now), otherwise
    it is locked with mlock. A limit that is too low (`ulimit -l`), or CUDA, may refuse: then the
    memory is pageable and everything works as before, only slower with CUDA.

    The memory goes when the buffer and all tensors of it are gone. A child process after fork
    has copies that are not locked.

    Args:
        nbytes: size, 0 or more; only the kernel rounds it, to whole pages.

    Attributes:
        nbytes: as given.
        pinned: whether the kernel keeps the pages in place.
        cuda: whether CUDA knows the pages, so `tensor().is_pinned()` is true.
        why_not: what refused to lock the memory, or None.

    Raises:
        ValueError: nbytes is negative.
        MemoryError: there is not so much memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"PinnedBuffer: nbytes is {nbytes}, expected 0 or more")
        self._lend(_LentPages(nbytes, lock=True), nbytes)

    @classmethod
    def _of(cls, memory: "_LentPages", nbytes: int) -> "PinnedBuffer":
        buffer = cls.__new__(cls)
        buffer._lend(memory, nbytes)
        return buffer

    def _lend(self, memory: "_LentPages", nbytes: int) -> None:
        self.nbytes = nbytes
        self.pinned = memory.pinned
        self.cuda = memory.cuda
        self.why_not = memory.why_not
        self.address: int = memory.pages.address
        # All tensors hold this view, so the loan ends with the last of them.
        self._view = memoryview(memory.pages)[:nbytes]
        self._at_end: list[Callable[[], object]] = []
        end = weakref.finalize(self._view, _end_loan, self._at_end, memory, os.getpid())
        end.atexit = False  # the process takes all memory with it

    def tensor(
        self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return a tensor over the beginning of the memory, which lives as long as the tensor.

        Args:
            dtype: of the tensor.
            shape: of the tensor, at most nbytes in all; default one dimension, all of the memory.

        Raises:
            ValueError: the memory is too small, or its size is no multiple of the dtype's.
        """
        size = dtype.itemsize
        if shape is None:
            if self.nbytes % size:
                raise ValueError(
                    f"PinnedBuffer: nbytes is {self.nbytes}, expected a multiple of {size} for "
                    f"{dtype}; give a shape"
                )
            shape = [self.nbytes // size]
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * size > self.nbytes:
            raise ValueError(
                f"PinnedBuffer: shape is {list(shape)} of {dtype}, expected at most "
                f"{self.nbytes} bytes"
            )
        if count == 0:  # torch.frombuffer takes no empty buffer
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._view, dtype=dtype, count=count).reshape(shape)

    def _at_release(self, callback: Callable[[], object]) -> None:
        """Call this once before the memory is freed or lent anew; never in a forked child.

        It may run in any thread, and must not refer to anything that owns the buffer, or neither
        would ever go.
        """
        self._at_end.append(callback)

    def __repr__(self) -> str:
        how = "registered with CUDA" if self.cuda else "locked" if self.pinned else "pageable"
        return f"PinnedBuffer({self.nbytes}, {how})"


class PinnedPool(Owner):
    """Hand out pinned memory within a budget.

    Memory returns to the pool when the last tensor of it is gone. It stays locked for the next
    request of the same number of pages, and is freed, the longest unused first, when
    another request needs the budget. Requests beyond the budget, and those that the kernel or CUDA
    refuses to lock, get pageable memory, and are counted. Safe from several threads.

    Args:
        budget: bytes, most that are locked at any time, in use or kept; None: no limit.

    Raises:
        ValueError: budget is negative.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"PinnedPool: budget is {budget}, expected 0 or more, or None")
        self.budget = budget
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may want memory, too
        self._kept: list[_LentPages] = []  # the longest unused first
        # Loans may end in a garbage collection, in the middle of anything: they only leave a note.
        self._ended: deque[_LentPages] = deque()
        self._pinned_bytes = 0
        self._in_use = 0
        self._peak = 0
        self._pageable = 0
        self._buffers = 0

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor in pinned memory of the pool.

        Args:
            shape: of the tensor.
            dtype: of the tensor.

        Raises:
            ValueError: a dimension is negative.
            MemoryError: there is not so much memory.
        """
        shape = [shape] if isinstance(shape, int) else list(shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"PinnedPool: shape is {shape}, expected dimensions of 0 or more")
        return self.take(math.prod(shape) * dtype.itemsize).tensor(dtype, shape)

    def take(self, nbytes: int) -> PinnedBuffer:
        """Return a buffer of this many bytes, uninitialised.

        Raises:
            ValueError: nbytes is negative.
            MemoryError: there is not so much memory.
        """
        if nbytes < 0:
            raise ValueError(f"PinnedPool: nbytes is {nbytes}, expected 0 or more")
        self._leave_parent()
        with self._lock:
            self._settle()
            memory = self._kept_one(_in_kernel_pages(nbytes)) or self._new(nbytes)
            memory.on_return = self._ended.append
            self._buffers += 1
            if memory.pinned:
                self._in_use += memory.locked_bytes
        return PinnedBuffer._of(memory, nbytes)

    def trim(self) -> None:
        """Free the memory that nobody uses now."""
        self._leave_parent()
        with self._lock:
            self._settle()
            self._free_kept(self._pinned_bytes)

    def stats(self) -> dict[str, int]:
        """Return bytes and counts.

        Returns:
            `pinned_bytes` locked now, in use or kept; `peak` of that; `in_use` bytes of it;
            `pageable` requests so far that got no locked memory; `buffers` that are out now.
        """
        self._leave_parent()
        with self._lock:
            self._settle()
            return {
                "pinned_bytes": self._pinned_bytes,
                "peak": self._peak,
                "in_use": self._in_use,
                "pageable": self._pageable,
                "buffers": self._buffers,
            }

    def _leave_parent(self) -> None:
        """Begin anew in a forked child: what the parent's pool has is not locked here."""
        if self._process != os.getpid():
            self._start()

    def _settle(self) -> None:
        """Take back what has ended since."""
        while self._ended:
            memory = self._ended.popleft()
            self._buffers -= 1
            if memory.pinned:
                self._in_use -= memory.locked_bytes
                self._kept.append(memory)

    def _kept_one(self, locked_bytes: int) -> "_LentPages | None":
        for memory in reversed(self._kept.copy()):  # the latest may still be in the cache
            if memory.locked_bytes != locked_bytes:
                continue
            with contextlib.suppress(ValueError):  # a signal handler has taken it
                self._kept.remove(memory)
                return memory
        return None

    def _free_kept(self, nbytes: int) -> None:
        """Free at least this much, or all that nobody uses."""
        while nbytes > 0 and self._kept:
            freed = self._kept.pop(0).locked_bytes
            self._pinned_bytes -= freed
            nbytes -= freed

    def _new(self, nbytes: int) -> "_LentPages":
        needed = _in_kernel_pages(nbytes)
        if self.budget is not None:
            if self._in_use + needed > self.budget:
                logger.info(
                    "PinnedPool: %d bytes are pageable: %d of %d bytes are in use",
                    *(nbytes, self._in_use, self.budget),
                )
                self._pageable += 1
                return _LentPages(nbytes, lock=False)
            self._free_kept(self._pinned_bytes + needed - self.budget)
        memory = _LentPages(nbytes, lock=True)
        if not memory.pinned and self._kept:  # they count against the limit of the kernel, too
            self._free_kept(self._pinned_bytes)
            memory = _LentPages(nbytes, lock=True)
        if memory.pinned:
            self._pinned_bytes += memory.locked_bytes
            self._peak = max(self._peak, self._pinned_bytes)
        elif nbytes:
            self._pageable += 1
        return memory


class _LentPages:
    """Pages, how they are locked, and where they go when a loan ends."""

    def __init__(self, nbytes: int, *, lock: bool) -> None:
        self.locked_bytes = _in_kernel_pages(
            nbytes
        )  # all of them, since another loan may need them
        self.pages = native().Pages(self.locked_bytes)
        self.pinned = self.cuda = False
        self.why_not: str | None = None
        self.on_return: Callable[[_LentPages], object] | None = None
        if lock and nbytes:
            self._lock()

    def _lock(self) -> None:
        if torch.cuda.is_initialized():
            refusal = _register_with_cuda(self.pages, self.locked_bytes)
            self.cuda = self.pinned = refusal is None
            if self.cuda:
                return
            self.why_not = f"cudaHostRegister: {refusal}"
            logger.warning("PinnedBuffer: %d bytes: %s", self.locked_bytes, self.why_not)
        code = self.pages.lock()
        self.pinned = code == 0
        if code:
            because = f"mlock: {os.strerror(code)}; see ulimit -l"
            self.why_not = f"{self.why_not}; {because}" if self.why_not else because
            logger.info("PinnedBuffer: %d bytes are pageable: %s", self.locked_bytes, because)


def _end_loan(callbacks: list[Callable[[], object]], memory: _LentPages, process: int) -> None:
    """Nobody can see the memory any more."""
    if process != os.getpid():
        return
    for callback in callbacks:
        try:
            callback()
        except Exception:  # nobody is there to hear it
            logger.warning("PinnedBuffer: a release callback failed", exc_info=True)
    give_back, memory.on_return = memory.on_return, None
    if give_back is not None:
        give_back(memory)


def _register_with_cuda(pages: Any, nbytes: int) -> str | None:
    """Pin pages for CUDA until they go; return why not."""
    device = _device_in_use()
    refusal: list[str] = []

    def register() -> None:
        try:
            torch.cuda.set_device(device)
            cudart = torch.cuda.cudart()
            code = cudart.cudaHostRegister(pages.address, nbytes, _PORTABLE)
            if int(code):
                refusal.append(str(cudart.cudaGetErrorString(code)))
            else:
                pages.on_free = partial(_unregister, pages.address, device, os.getpid())
        except Exception as error:
            refusal.append(str(error))

    # CUDA keeps an error for the next check of the thread that met it, which would blame somebody
    # else; a thread of its own takes it along.
    thread = threading.Thread(target=register, name="deepspeed_ext-pin")
    try:
        thread.start()
    except RuntimeError as error:  # no more threads, or the interpreter is about to end
        return str(error)
    thread.join()
    return refusal[0] if refusal else None


def _device_in_use() -> int:
    """Return a device with a context, the current one if it has: a new one takes much memory."""
    current = torch.cuda.current_device()
    if has_cuda_context is None:
        return current
    return next(filter(has_cuda_context, [current, *range(torch.cuda.device_count())]), current)


def _unregister(address: int, device: int, process: int) -> None:
    """Undo the registration; not in a forked child, where CUDA and these pages are the parent's."""
    if process == os.getpid() and not sys.is_finalizing():
        with torch.cuda.device(device):  # a fresh thread would otherwise use, and so open, device 0
            torch.cuda.cudart().cudaHostUnregister(address)


def _in_kernel_pages(nbytes: int) -> int:
    page = os.sysconf("SC_PAGESIZE")
    return -(-nbytes // page) * page
