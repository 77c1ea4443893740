"""aio_handle: the asynchronous I/O interface of older libraries, over AsyncIO."""

import errno
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io.async_io import AsyncIO
from deepspeed_ext.io.future import Future
from deepspeed_ext.io.pinned import PinnedBuffer

_FAMILIAR_ALIGNMENT = 512  # bytes, for each thread
_COMPARED_AT_ONCE = 64 << 20  # bytes

FileName = str | os.PathLike[str] | int


class aio_handle:
    """Read and write tensors with the familiar calls.

    Existing code runs. What differs is what used to go wrong: a failure raises (it does not return
    -1 or end the process), any size, offset, address and strides are right, a file shorter than the
    tensor raises, a file gets the mode 0666 & ~umask, nothing is printed. A write still leaves what a longer
    file has behind it; AsyncIO can truncate.

    Every method takes a path or, for a file that is open already, its descriptor. Any thread may call.

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
        self._lock = threading.Lock()  # guards these three
        self._pending: list[Future] = []  # the oldest first
        self._completed = 0  # since the last wait()
        self._locked: dict[int, weakref.ref[Any]] = {}  # by address: the memory of a locked tensor

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
