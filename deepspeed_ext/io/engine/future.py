"""Future: a transfer that is under way."""

import concurrent.futures
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any, NoReturn, Protocol

from torch import Tensor

from deepspeed_ext.io.engine.watcher import Watcher
from deepspeed_ext.io.owner import Owner
from deepspeed_ext.io.tensors import Memory, a

_SLICE = 0.1  # seconds between two looks at signals

# What concurrent.futures.wait and as_completed look for in `_state`.
_PENDING, _FINISHED, _CANCELLED = "PENDING", "FINISHED", "CANCELLED_AND_NOTIFIED"

_log = logging.getLogger("deepspeed_ext")

if sys.version_info >= (3, 11):
    _TimedOut = TimeoutError
else:

    class _TimedOut(TimeoutError, concurrent.futures.TimeoutError):
        """Both of the classes that later Pythons made one."""


def check_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError unless this is None or seconds."""
    if timeout is None:
        return
    if not isinstance(timeout, int | float):
        raise TypeError(f"aio: timeout is {a(timeout)}, expected seconds or None")
    if not timeout >= 0:
        raise ValueError(f"aio: timeout is {timeout}, expected 0 seconds or more, or None")


class Mailbox(Protocol):
    """Takes the numbers of jobs that are done."""

    def put(self, number: int) -> None: ...


class Job(Protocol):
    """What a Future waits for: a request of the engine, or several together."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so long and tell whether it is done; lets other threads run."""

    def done(self) -> bool:
        """Tell whether it is done."""

    def check(self) -> None:
        """Raise what went wrong with a job that is done."""

    def begun(self) -> bool:
        """Tell whether it is too late for `cancel`."""

    def cancel(self) -> bool:
        """Take it back if nothing of it has begun, which makes it done; tell whether it did."""

    def tell(self, mailbox: Mailbox, number: int) -> None:
        """Put the number there once it is done, be it now."""


class Future(Owner, concurrent.futures.Future[Tensor]):
    """The tensor of a transfer, once every byte of it has moved.

    Made by AsyncIO and TensorStore. Any thread may ask, and as often as it likes. It is a
    `concurrent.futures.Future`, so `concurrent.futures.wait`, `as_completed` and
    `asyncio.wrap_future` take it; a coroutine may `await` it, alone or through `asyncio.gather`,
    `wait` and `wait_for`.

    Args:
        job: what to wait for; may be another Future.
        tensor: what `result` returns; it is kept alive until the job is done.
        finish: called once when the job is done, by whoever sees it first; returns the tensor for
            `result`, or raises.
        memory: what the job and `finish` use; must stay where it is and as long until then.
        what: names the transfer in errors.
    """

    # Without super().__init__(), which makes more than most transfers need. These names are the
    # base's, which the functions of concurrent.futures look at.
    _state: str
    _result: Tensor | None  # None once it has failed
    _exception: BaseException | None

    def __init__(
        self,
        job: Job,
        tensor: Tensor,
        finish: Callable[[], Tensor] | None = None,
        memory: tuple[Memory, ...] = (),
        what: str = "transfer",
    ) -> None:
        self._job = job
        self._state = _PENDING
        self._result = tensor
        self._exception = None
        self._finish = finish
        self._memory = memory
        self._what = what
        self._lock = threading.RLock()
        self._changed: threading.Condition | None = None
        self._waiters: list[Any] = []  # of concurrent.futures.wait and as_completed
        self._callbacks: list[tuple[object, Callable[[], object]]] = []
        self._settled = False
        self._process = os.getpid()
        self._on_settled: Callable[[Future], None] | None = None
        self._watcher: Watcher | None = None
        self._is_watched = False
        self.collected = False  # somebody was told how it ended

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the transfer and return its tensor.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is still under way; it goes on, and its memory stays alive.
            OSError: it failed; the text names path, offset, length, cause and free space. EFAULT:
                the memory of the tensor was freed, resized or moved meanwhile.
            concurrent.futures.CancelledError: `cancel` took it back.
        """
        failure = self.exception(timeout)
        if failure is not None:
            raise failure.with_traceback(None)  # or that of every caller before would stay alive
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the transfer and return what went wrong, or None.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is still under way.
            concurrent.futures.CancelledError: `cancel` took it back.
        """
        check_timeout(timeout)
        if not self.wait(timeout):
            raise _TimedOut(
                f"aio: {self._what} has been under way for {timeout} s, expected its end;"
                " it goes on, ask again"
            )
        self.collected = True
        if self._state == _CANCELLED:
            assert self._exception is not None
            raise self._exception.with_traceback(None)
        return self._exception

    def done(self) -> bool:
        """Tell whether it has ended, well or not; takes its last step, such as a checksum."""
        if self._settled:
            return True
        self._check_process()
        if not self._job.done():
            return False
        self._settle()
        return True

    def running(self) -> bool:
        """Tell whether it is under way, and too late for `cancel`."""
        return not self.done() and self._job.begun()

    def cancelled(self) -> bool:
        """Tell whether `cancel` took it back."""
        return self.done() and self._state == _CANCELLED

    def cancel(self) -> bool:
        """Take the transfer back if nothing of it has begun.

        What waits in the queue of an AsyncIO can be taken back: it touches neither file nor memory.
        All else, and every request of a TensorStore, goes on.

        Returns:
            Whether it is cancelled.
        """
        with self._lock:
            if self._settled:
                return self._state == _CANCELLED
            self._check_process()
            if not self._job.cancel():
                return False
            self._settle(cancelled=True)
            return True

    def add_done_callback(self, fn: Callable[["Future"], object]) -> None:
        """Call a function with this Future when it has ended, or now if it has.

        The engine has one thread for all callbacks, which exists while there are some to call. A
        function that is given by a coroutine is called by its event loop. What it raises is logged;
        but Ctrl-C and SystemExit in one that is called now reach the caller.
        """
        with self._lock:
            later = not self._settled
            if later:
                self._check_process()
                self._callbacks.append((fn, _as_its_loop_would(functools.partial(fn, self))))
        if later:
            self._watch()
        else:
            self._call(functools.partial(fn, self))

    def remove_done_callback(self, fn: Callable[["Future"], object]) -> int:
        """Forget a function that was not called yet, and return how often it was there."""
        with self._lock:
            kept = [entry for entry in self._callbacks if entry[0] != fn]
            removed = len(self._callbacks) - len(kept)
            self._callbacks = kept
        return removed

    def __await__(self) -> Generator[Any, None, Tensor]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        state = "under way"
        if self._settled:
            state = "done" if self._exception is None else type(self._exception).__name__
        return f"<Future of {self._what}: {state}>"

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
        if self._exception is not None:
            raise self._exception.with_traceback(None)

    # A Future is a Job, too

    def begun(self) -> bool:
        """Tell whether it is too late for `cancel`."""
        return self._settled or self._job.begun()

    def tell(self, mailbox: Mailbox, number: int) -> None:
        """Put the number there once the job is done, be it now."""
        self._job.tell(mailbox, number)

    def announce(self) -> None:
        """Call the callbacks of a transfer whose job is done."""
        self.wait()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for _, call in callbacks:
            self._call(call, logged=BaseException)  # SystemExit, too: others wait for theirs

    # What concurrent.futures and asyncio call

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """The lock of `_state` and `_waiters`; who takes it wants to be told of the end."""
        if not self._settled:
            self._watch()
        with self._lock:
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            return self._changed

    def _get_snapshot(self) -> tuple[bool, bool, Tensor | None, BaseException | None]:
        """Return done, cancelled, result and exception: asyncio asks so from Python 3.14 on."""
        if not self.done():
            return False, False, None, None
        self.collected = True
        if self._state == _CANCELLED:
            return True, True, None, None
        return True, False, self._result, self._exception

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(f"aio: the outcome of {self._what} is set, expected its engine to do so")

    set_result = set_exception = _refuse  # type: ignore[assignment]
    set_running_or_notify_cancel = _refuse

    # The rest is its own

    def _watch(self) -> None:
        self._check_process()
        with self._lock:
            if self._is_watched:
                return
            self._is_watched = True
            watcher = self._watcher = self._watcher or Watcher()
        watcher.watch(self.tell, self.announce)

    def _call(self, call: Callable[[], object], logged: type[BaseException] = Exception) -> None:
        try:
            call()
        except logged:
            _log.exception("aio: a callback of %s failed", self._what)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"aio: {self._what} is waited for in process {os.getpid()}, expected process"
                f" {self._process}, which began it"
            )

    def _settle(self, *, cancelled: bool = False) -> None:
        """Take down how it ended, let go of what it needed, and tell who waits."""
        with self._lock:
            if self._settled:
                return
            try:
                if cancelled:
                    raise CancelledError(f"aio: {self._what} was cancelled before it began")
                self._job.check()
                for memory in self._memory:
                    memory.check(self._what)
                if self._finish is not None:
                    self._result = self._finish()
            except Exception as failure:
                self._exception = failure.with_traceback(None)
                self._result = None
            self._finish = None
            self._memory = ()
            is_cancelled = isinstance(self._exception, CancelledError)
            self.collected |= is_cancelled  # by the caller's own wish
            if self._on_settled is not None:
                self._on_settled(self)
            self._state = _CANCELLED if is_cancelled else _FINISHED
            self._settled = True  # last: whoever sees it finds all of the above done
            self._notify()

    def _notify(self) -> None:
        """Wake the functions of concurrent.futures that wait for it."""
        for waiter in self._waiters:
            if self._state == _CANCELLED:
                waiter.add_cancelled(self)
            elif self._exception is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)
        if self._changed is not None:
            self._changed.notify_all()


def _as_its_loop_would(call: Callable[[], object]) -> Callable[[], object]:
    """Return what makes the event loop of this thread call it; itself when there is none."""
    if "asyncio" not in sys.modules:
        return call
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return call

    def hand_over() -> object:
        try:
            return loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed
            return call()

    return hand_over
