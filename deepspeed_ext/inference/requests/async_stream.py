"""Completions as they come, for coroutines: nothing waits but what awaits."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from weakref import ref

from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece, Stream

_AT_A_TIME = 16  # coroutines that are woken before the loop looks for what else there is


class LoopBell:
    """Wakes coroutines of one event loop from other threads: many by one message.

    Those that wait for their first news come first. The loop does what else it has to do, such as
    to take in requests, after some of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # or who keeps bells by their loops would keep these
        self._first, self._others = deque[asyncio.Event](), deque[asyncio.Event]()
        self._is_sent = False

    def add(self, event: asyncio.Event, is_first: bool) -> None:
        """Let an event of the loop be one of those that `ring` sets, from any thread."""
        (self._first if is_first else self._others).append(event)

    def ring(self) -> None:
        """Set all events soon, from any thread; not those of a loop that is closed."""
        loop = self._loop()
        if loop is not None and (self._first or self._others) and not self._is_sent:
            self._is_sent = True
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        for _ in range(_AT_A_TIME):
            some = self._first or self._others
            if some:
                some.popleft().set()
        if self._first or self._others:
            asyncio.get_running_loop().call_soon(self._answer)
            return
        self._is_sent = False
        self.ring()  # what came in between found that a message was sent


class AsyncStream(AsyncIterator[Piece]):
    """The completions of one call, for one task. The last piece of each says how it ended.

    A task that is cancelled while it waits for a piece closes the stream, as leaving ``async with``
    and letting go of the stream do: the next step begins with taking back what it had.

    Args:
        stream: the same for threads, whose `advance` nobody calls here.
        event: is set when there is something new.
    """

    def __init__(self, stream: Stream, event: asyncio.Event) -> None:
        self._stream, self._event = stream, event
        self._error: RuntimeError | None = None

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        pieces = await self.some(1)
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    async def some(self, most: int) -> list[Piece]:
        """Return all pieces that are there, once there is one; none if there will be none.

        Args:
            most: the others stay for the next time.

        Raises:
            RuntimeError: a completion has failed.
        """
        stream, event = self._stream, self._event
        try:
            while True:
                if not event.is_set() and not stream.is_closed:
                    await event.wait()
                event.clear()  # first: what is new from here on sets it again
                found = self._taken(most)
                if found or stream.is_closed:
                    return found
        except asyncio.CancelledError:
            self.close()
            raise

    def _taken(self, most: int) -> list[Piece]:
        found = list[Piece]()
        if self._error is not None:
            raise self._error
        try:
            while len(found) < most and (piece := self._stream.take()) is not None:
                found.append(piece)
        except RuntimeError as error:
            if not found:
                raise
            self._error = error  # for the next time
        if len(found) == most or self._error is not None:
            self._event.set()  # as there may be more
        return found

    def completions(self) -> list[Completion]:
        """Return what came of all, when all pieces were taken.

        Raises:
            RuntimeError: some are not done, or have failed.
        """
        return self._stream.completions()

    def cancel(self, which: int) -> None:
        """End one of the completions as it is; the others go on.

        Raises:
            TypeError, ValueError: there is none of this number.
        """
        self._stream.cancel(which)

    def close(self) -> None:
        """End all as they are; there are no more pieces. It waits for nobody.

        If a task waits for a piece, it has to be called in its event loop.
        """
        self._stream.close()
        self._event.set()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
