"""Window: transfers under way that may hold only so much memory together."""

from collections import deque
from collections.abc import Callable

from deepspeed_ext.io.engine.future import Future


class Window:
    """Waits for the oldest transfer when there is too much under way, and for all at the end.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._queue: deque[tuple[Future, int, Callable[[], None] | None]] = deque()

    def add(self, future: Future, nbytes: int, then: Callable[[], None] | None = None) -> None:
        """Take over a transfer that has begun.

        Args:
            future: of the transfer.
            nbytes: that it holds.
            then: called when it has ended well; transfers end in the order in which they came.

        Raises:
            OSError: an older transfer failed.
        """
        self._queue.append((future, nbytes, then))
        self._held += nbytes
        while self._held > self._limit:
            self._end_oldest()

    def finish(self) -> None:
        """Wait for all; raise the first failure."""
        while self._queue:
            self._end_oldest()

    def abandon(self) -> None:
        """Wait for all that is still under way, however it ends: it uses memory and a file."""
        while self._queue:
            self._queue.popleft()[0].exception()

    def _end_oldest(self) -> None:
        future, nbytes, then = self._queue[0]
        future.result()
        self._queue.popleft()
        self._held -= nbytes
        if then is not None:
            then()
