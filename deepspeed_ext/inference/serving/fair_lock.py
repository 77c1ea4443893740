"""FairLock: one thread at a time works, and the others wait until they are wanted."""

import threading
from collections import deque
from collections.abc import Callable

_PATIENCE = 1.0  # seconds until a thread looks again, as an interruption may stop who would wake it


class FairLock:
    """Let one thread at a time work.

    An interruption, as by Ctrl-C, may come between any two lines, and ends the turn of its thread.
    Within a turn, a signal handler or a finalizer may want one in the same thread: it would wait
    for itself, so it has to ask `is_mine` first.
    """

    def __init__(self) -> None:
        self._holder: int | None = None  # the thread that works
        self._claiming = threading.RLock()  # held for moments, in which a signal handler may run
        self._bells: deque[threading.Lock] = deque()  # of threads that wait

    @property
    def is_mine(self) -> bool:
        """Whether this thread is at work."""
        return self._holder == threading.get_ident()

    def run(self, work: Callable[[], object], is_enough: Callable[[], bool]) -> None:
        """Work as soon as no other thread does, unless it is enough before.

        Args:
            work: what to do in the turn.
            is_enough: is asked after each turn of another thread.
        """
        me = threading.get_ident()
        assert self._holder != me, "a turn within a turn"
        try:
            if self._wait(me, is_enough):
                work()
        finally:
            if self._holder == me:  # no call until it is over: nothing can come in between
                self._holder = None
                self._wake()

    def _wait(self, me: int, is_enough: Callable[[], bool]) -> bool:
        """Return whether it is the turn of this thread; else it is enough."""
        bell: threading.Lock | None = None
        while True:
            with self._claiming:
                if self._holder is None:
                    if is_enough():
                        return False
                    self._holder = me
                    return True
            if is_enough():
                return False
            if bell is not None:
                bell.acquire(timeout=_PATIENCE)
            bell = threading.Lock()
            bell.acquire()
            self._bells.append(bell)  # and look again, as a turn may have ended before it was there

    def _wake(self) -> None:
        while self._bells:
            try:
                self._bells.popleft().release()
            except IndexError:  # another thread was faster
                return
