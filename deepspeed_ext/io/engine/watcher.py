"""Watcher: tells futures of their end, for those who do not want to wait for it."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

from deepspeed_ext.io._native import native
from deepspeed_ext.threads import AwaitedThread

_LINGER = 0.02  # seconds that the thread stays for more
_LONG = 3600.0
_NOBODY = -1  # a number that no future has
Announce = Callable[[], None]


class Watcher:
    """Waits in a thread for futures that have callbacks; any thread may call.

    The thread exists only while there are such futures, so nobody has to end it, and Python waits
    for it at exit as for every thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may begin a transfer, too
        self._numbers = itertools.count()
        self._watched: dict[int, Announce] = {}  # by number
        self._mailbox: Any = None
        self._thread: threading.Thread | None = None

    def watch(self, tell: Callable[[Any, int], None], announce: Announce) -> None:
        """Call a function of a future when its job is done.

        Args:
            tell: given a mailbox and a number, has that put there once the job is done.
            announce: the function.
        """
        with self._lock:
            if self._mailbox is None:
                self._mailbox = native().Mailbox()
        number = next(self._numbers)
        try:
            with self._lock:
                self._watched[number] = announce
                if self._thread is None:
                    AwaitedThread(self._run, "deepspeed_ext-futures", hurry=self._hurry).start()
            tell(self._mailbox, number)
        except BaseException:  # Ctrl-C, or Python is about to end
            self._mailbox.put(number)  # or a thread would wait for it for ever
            raise

    def _run(self) -> None:
        with self._lock:
            if self._thread is not None:  # another one was quicker
                return
            self._thread = threading.current_thread()
        while self._announce(self._mailbox.take(_LONG if self._watched else _LINGER)):
            pass

    def _hurry(self) -> None:
        """Let the thread go, though there are transfers whose callbacks will not be called now."""
        with self._lock:
            self._watched.clear()
        self._mailbox.put(_NOBODY)

    def _announce(self, numbers: list[int]) -> bool:
        """Tell these futures; false when the thread shall end."""
        with self._lock:
            ended = [self._watched.pop(number) for number in numbers if number in self._watched]
            goes_on = bool(numbers or self._watched)
            if not goes_on:
                self._thread = None
        for announce in ended:
            announce()
        return goes_on
