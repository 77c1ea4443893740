"""InFlight: the transfers of one owner, kept until their outcome is known to somebody."""

import logging
import threading
import time
from collections import deque

from deepspeed_ext.io.engine.future import Future, check_timeout
from deepspeed_ext.io.engine.watcher import Watcher

_log = logging.getLogger("deepspeed_ext")


class InFlight:
    """The transfers that have not ended, and those that ended badly without anybody being told.

    Args:
        owner: whose they are, for error texts.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # The collector may drop a store, which waits for its transfers, in the middle of anything
        # here, so the lock can be taken again, and what it guards changes in single steps.
        self._lock = threading.RLock()
        self._futures: dict[int, Future] = {}  # the oldest first
        self._failed: deque[Future] = deque()
        self._ended = 0
        self._held: dict[object, object] = {}
        self._watcher = Watcher()

    def hold(self, memory: object) -> object:
        """Keep memory alive from before a transfer begins until its Future is here.

        Ctrl-C may come in between. Then nobody knows whether it began, and the memory stays.

        Returns:
            What `release` takes.
        """
        token = object()
        self._held[token] = memory
        return token

    def release(self, token: object) -> None:
        """Let go of what `hold` was given."""
        self._held.pop(token, None)

    def release_all(self) -> None:
        """Let go of all that is held, as nothing is under way any more."""
        self._held.clear()

    def add(self, future: Future) -> None:
        future._on_settled = self._remove
        future._watcher = self._watcher
        with self._lock:
            self._futures[id(future)] = future
        self._let_go()

    def wait(self, timeout: float | None) -> int:
        """Wait for all of them, count and raise as AsyncIO.wait says."""
        check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            futures = list(self._futures.values())
        for i, future in enumerate(futures):
            if not future.wait(None if end is None else end - time.monotonic()):
                raise TimeoutError(
                    f"{self._owner}: {len(futures) - i} transfers are under way after {timeout} s,"
                    " expected none; they go on"
                )
        untold = self.take_untold()
        for other in untold[1:]:
            _log.error("%s: one more transfer failed: %s", self._owner, other)
        if untold:
            raise untold[0].with_traceback(None)
        with self._lock:
            ended, self._ended = self._ended, 0
        return ended

    def take_untold(self) -> list[BaseException]:
        """Return the failures that nobody was told, and forget them."""
        with self._lock:
            failed, self._failed = self._failed, deque()
        untold = [future for future in failed if not future.collected]
        return [failure for future in untold if (failure := future.exception()) is not None]

    def _let_go(self) -> None:
        """Drop the oldest transfers that have ended: nobody may ever ask for them."""
        while True:
            with self._lock:
                try:
                    oldest = next(iter(self._futures.values()), None)
                except RuntimeError:  # a signal handler came in between
                    continue
            if oldest is None or not oldest.done():
                return

    def _remove(self, future: Future) -> None:
        with self._lock:
            self._futures.pop(id(future), None)
            self._ended += 1
            if future._exception is not None:
                self._failed.append(future)
            while self._failed and self._failed[0].collected:
                self._failed.popleft()
