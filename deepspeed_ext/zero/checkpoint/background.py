"""Saves that nobody waits for: a thread each, and an end of the program that tells of a failure."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from deepspeed_ext.threads import AwaitedThread, answer

_STATUS = 120  # Python's, of a program that could not end as it should
_log = logging.getLogger("deepspeed_ext")
_untold: "set[Saving]" = set()  # under way, or failed


class Saving(Future[None]):
    """The Future of a save in a thread, which knows whether somebody was told how it ended.

    If nobody was when the program ends, its failure is logged, and the exit status is 120: that is
    what Python makes of a standard stream that cannot be flushed at the end, without leaving out
    anything else that is to be done there. A program that an exception has ended keeps its status.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> None:
        """Wait, and raise what has failed."""
        self.exception(timeout)
        super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what has failed."""
        error = super().exception(timeout)
        _untold.discard(self)
        return error

    def is_told(self) -> bool:
        """Tell whether somebody was told how it ended."""
        return self not in _untold

    def is_here(self) -> bool:
        """Tell whether its thread is one of this process, not of one that has forked this one."""
        return self._process == os.getpid()


def in_background(work: Callable[[], None]) -> Saving:
    """Do work in a thread, which Python waits for when the program ends, also after Ctrl-C."""
    saving = Saving()
    saving.set_running_or_notify_cancel()
    if multiprocessing.parent_process() is not None and not any(s.is_here() for s in _untold):
        # One that was forked ends without Python's last steps.
        Finalize(None, _end_worker, exitpriority=-1000)
    AwaitedThread(partial(answer, saving, work), "zero.save").start()
    _untold.add(saving)
    return saving


def _tell() -> bool:
    """Wait for all saves, and log failures that nobody knows of; return whether there are any."""
    failed = False
    for saving in [saving for saving in _untold if saving.is_here()]:
        error = saving.exception()
        if error is not None:
            failed = True
            _log.error(
                "zero.save: the last save failed, and nobody asked for its result: %s", error
            )
    return failed


def _end_program() -> None:
    if _tell() and getattr(sys, "last_value", None) is None:
        sys.stderr = _Unflushable(sys.stderr)


def _end_worker() -> None:
    """End a process of multiprocessing with a status, unless it has one already."""
    error = sys.exc_info()[1]
    has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if _tell() and not has_failed:
        raise SystemExit(_STATUS)


class _Unflushable:
    """Standard error as it is, but that the flush at the end of the program fails."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush, and fail."""
        with contextlib.suppress(Exception):
            self._stream.flush()
        raise OSError("zero.save: the last save failed")


# Now, so that it comes after what a program registers for its end.
atexit.register(_end_program)
