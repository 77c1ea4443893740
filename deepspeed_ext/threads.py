"""Threads of ours that are over before Python is.

Python ends a daemon thread where it comes back from native code. In the middle of torch that is in
a destructor which lets no exception through, so the process aborts: "terminate called without an
active exception". The same happens to any thread when Ctrl-C ends Python's wait for it.
"""

import atexit
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from deepspeed_ext.captures import beside_captures

T = TypeVar("T")


class AwaitedThread(threading.Thread):
    """A thread that Python waits for when it ends, whatever comes in between.

    Args:
        target: what it does.
        name: of the thread.
        at_end: called when Python begins to end, in the main thread: the target shall return when
            it has nothing left to do. It can ask `is_ending`.
        hurry: called when Ctrl-C comes while Python waits: the target shall return soon.
    """

    def __init__(
        self,
        target: Callable[[], object],
        name: str,
        at_end: Callable[[], object] = bool,
        hurry: Callable[[], object] = bool,
    ) -> None:
        super().__init__(target=target, name=name, daemon=False)
        self.at_end, self.hurry = at_end, hurry
        self._is_over = threading.Event()
        _end()

    def run(self) -> None:
        """Do it."""
        try:
            with beside_captures():
                super().run()
        finally:
            self._is_over.set()

    def await_end(self) -> None:
        """Return when the target has, which Ctrl-C does not change.

        Raises:
            BaseException: what came in between.
        """
        interrupt: BaseException | None = None
        while not self._is_over.is_set():
            try:
                self._is_over.wait()  # join() and is_alive() take an interrupted join for the end
            except BaseException as error:
                interrupt = error
                self.hurry()
        if interrupt is not None:
            raise interrupt


def answer(future: "Future[T]", work: Callable[[], T]) -> None:
    """Do work, and give a Future what it returns or raises."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def is_ending() -> bool:
    """Return whether the main thread is over, and Python waits for the others to be."""
    return _end().is_set()


def is_awaited() -> bool:
    """Return whether Python waits for what the current thread starts now."""
    current = threading.current_thread()
    return not is_ending() or not (current.daemon or current is threading.main_thread())


@functools.cache
def _end() -> threading.Event:
    """Return what is set when Python begins to end; threads that know of it are joined then."""
    end = threading.Event()
    try:
        # It has no public name. concurrent.futures ends its threads by it, and atexit comes too
        # late: by then Python waits for these threads, or Ctrl-C has ended that wait.
        threading._register_atexit(_await_all, end)  # type: ignore[attr-defined]
    except RuntimeError:  # Python is ending already
        end.set()
    # Ctrl-C in what others have registered ends all that, and Python waits for no thread: then
    # atexit is in time.
    atexit.register(_await_all, end)
    return end


def _await_all(end: threading.Event) -> None:
    end.set()
    threads = [t for t in threading.enumerate() if isinstance(t, AwaitedThread) and t.ident]
    for thread in threads:
        thread.at_end()
    with ExitStack() as each:  # all of them, whichever is interrupted
        for thread in threads:
            each.callback(thread.await_end)
