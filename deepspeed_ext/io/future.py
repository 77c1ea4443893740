"""Future: a transfer that is under way."""

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from deepspeed_ext.io.tensors import a

_SLICE = 0.1  # seconds between two looks at signals


def check_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError unless this is None or seconds."""
    if timeout is None:
        return
    if not isinstance(timeout, int | float):
        raise TypeError(f"aio: timeout is {a(timeout)}, expected seconds or None")
    if not timeout >= 0:
        raise ValueError(f"aio: timeout is {timeout}, expected 0 seconds or more, or None")


class Job(Protocol):
    """What a Future waits for: a request of the engine, or several together."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so long and tell whether it is done; lets other threads run."""

    def done(self) -> bool:
        """Tell whether it is done."""

    def check(self) -> None:
        """Raise what went wrong with a job that is done."""


class Future:
    """The tensor of a transfer, once every byte of it has moved.

    Made by AsyncIO and TensorStore. Any thread may ask, and as often as it likes.

    Args:
        job: what to wait for; may be another Future.
        tensor: what `result` returns; it is kept alive until the job is done.
        finish: called once when the job is done, by whoever sees it first; returns the tensor for
            `result`, or raises.
        sources: what else the job needs in memory until it is done.
        what: names the transfer in the error of a wait that takes too long.
    """

    def __init__(
        self,
        job: Job,
        tensor: Tensor,
        finish: Callable[[], Tensor] | None = None,
        sources: tuple[object, ...] = (),
        what: str = "transfer",
    ) -> None:
        self._job = job
        self._tensor: Tensor | None = tensor  # None once it has failed
        self._finish = finish
        self._sources = sources
        self._what = what
        self._lock = threading.RLock()
        self._settled = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._on_settled: Callable[[Future], None] | None = None
        self.collected = False  # somebody was told how it ended

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the transfer and return its tensor.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is still under way; it goes on, and its memory stays alive.
            OSError: it failed; the text names path, offset, length, cause and free space.
        """
        failure = self.exception(timeout)
        if failure is not None:
            raise failure.with_traceback(None)  # or that of every caller before would stay alive
        assert self._tensor is not None
        return self._tensor

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the transfer and return what went wrong, or None.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is still under way.
        """
        check_timeout(timeout)
        if not self.wait(timeout):
            raise TimeoutError(
                f"aio: {self._what} has been under way for {timeout} s, expected its end;"
                " it goes on, ask again"
            )
        self.collected = True
        return self._failure

    def done(self) -> bool:
        """Tell whether it has ended, well or not; takes its last step, such as a checksum."""
        if self._settled:
            return True
        self._check_process()
        if not self._job.done():
            return False
        self._settle()
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most so long (None: as long as it takes) and tell whether it has ended."""
        if self._settled:
            return True
        self._check_process()
        end = None if seconds is None else time.monotonic() + seconds
        while True:  # in slices, so that Ctrl-C gets through
            left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
            if self._job.wait(max(left, 0.0)):
                self._settle()
                return True
            if left <= 0:
                return False

    def check(self) -> None:
        """Raise what went wrong with a transfer that has ended, as `done` has told."""
        if not self.done():
            return
        self.collected = True
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"aio: {self._what} is waited for in process {os.getpid()}, expected process"
                f" {self._process}, which began it"
            )

    def _settle(self) -> None:
        """Take down how it ended, and let go of what it needed."""
        with self._lock:
            if self._settled:
                return
            try:
                self._job.check()
                if self._finish is not None:
                    self._tensor = self._finish()
            except Exception as failure:
                self._failure = failure.with_traceback(None)
                self._tensor = None
            self._finish = None
            self._sources = ()
            if self._on_settled is not None:
                self._on_settled(self)
            self._settled = True  # last: whoever sees it finds all of the above done
