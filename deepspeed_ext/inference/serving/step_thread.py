"""StepThread: steps for coroutines, as long as one of them waits for completions."""

import asyncio
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakMethod

from deepspeed_ext.inference.requests.async_stream import AsyncStream, LoopBell
from deepspeed_ext.inference.requests.request import Call
from deepspeed_ext.inference.requests.stream import Stream
from deepspeed_ext.threads import AwaitedThread

_Unless = Callable[[Callable[[], bool]], None]


class StepThread:
    """One thread, which is there while a call is open, whatever the number of calls.

    Python waits for it when it ends, as other threads may have loops that go on; Ctrl-C hurries it.

    Args:
        advance: a method that lets the engine compute a step, unless what it is given is true by
            then. The engine is not held by it.
        sweep: lets the engine end what was cancelled, or was in a step that failed; likewise.
    """

    def __init__(self, advance: _Unless, sweep: _Unless) -> None:
        self._advance, self._sweep = WeakMethod(advance), WeakMethod(sweep)
        self._lock = threading.Lock()  # held for moments: who begins, or ends, the thread
        self._thread: AwaitedThread | None = None
        self._open: set[Call] = set()
        self._bells: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBell] = WeakKeyDictionary()
        self._rung: set[LoopBell] = set()

    def follow(self, call: Call, stream: Stream, submit: Callable[[], None]) -> AsyncStream:
        """Let a call take part, and return its stream for the loop that runs here.

        Raises:
            RuntimeError: no loop does; no thread can be started.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "stream: no event loop is running, expected a coroutine; elsewhere use"
                " generate(..., stream=True)"
            ) from None
        event, still_open, rung = asyncio.Event(), self._open, self._rung
        with self._lock:
            if loop not in self._bells:
                self._bells[loop] = LoopBell(loop)
            bell = self._bells[loop]

        is_first = True

        def notify() -> None:
            nonlocal is_first
            if call.open == 0:
                still_open.discard(call)
            bell.add(event, is_first)
            is_first = False
            rung.add(bell)

        call.notify = notify
        event.set()  # as some may be done before they begin
        followed = AsyncStream(stream, event)
        if call.open > 0:
            try:
                with self._lock:
                    self._begin()
                    self._open.add(call)
                    submit()
            except BaseException:  # of a signal handler, if not for want of threads
                stream.close()
                raise
        return followed

    def _begin(self) -> None:
        """Let the thread be there, which waits for the lock; one that failed to start is not."""
        if self._thread is None:
            try:
                self._thread = AwaitedThread(
                    self._run, "deepspeed_ext-inference", hurry=self._open.clear
                )
                self._thread.start()
            except BaseException:
                self._thread = None
                raise

    def ring(self) -> None:
        """Wake the loops of all calls that were told something: once for a step, not for each."""
        while self._rung:
            try:
                bell = self._rung.pop()
            except KeyError:  # another thread was faster
                return
            bell.ring()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():  # its start was interrupted
                    return
                advance, sweep = self._advance(), self._sweep()
                if not self._open or advance is None or sweep is None:
                    self._thread = None
                    return
            try:
                advance(lambda: not self._open)
            except Exception as error:
                self._give_up(error, sweep)
            del advance, sweep  # or the engine would live as long as the thread

    def _give_up(self, error: Exception, sweep: _Unless) -> None:
        """Let calls know why they failed with a step; all of them if nothing helps."""
        followed = list(self._open)
        try:
            sweep(lambda: False)
        except Exception:
            for request in [each for call in followed for each in call.requests]:
                request.fail(error)
            self.ring()
        for call in followed:
            if call.error is not None and call.error is not error and not call.error.__cause__:
                call.error.__cause__ = error
