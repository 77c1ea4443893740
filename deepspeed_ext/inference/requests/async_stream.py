"""Completions as they come, for coroutines: nothing waits but what awaits."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece, Stream


class LoopBell:
    """Wakes coroutines of one event loop from other threads: many at a time, by one message."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung: deque[asyncio.Event] = deque()
        self._is_sent = False

    def ring(self, event: asyncio.Event) -> None:
        """Set an event of the loop soon, from any thread; not of one that is closed."""
        self._rung.append(event)
        if not self._is_sent:
            self._is_sent = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._is_sent = False  # first: what is rung from here on sends again
        while self._rung:
            self._rung.popleft().set()


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

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        try:
            while True:
                self._event.clear()  # first: what is new from here on sets it again
                piece = self._stream.take()
                if piece is not None:
                    return piece
                if self._stream.is_closed:
                    raise StopAsyncIteration
                await self._event.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    def completions(self) -> list[Completion]:
        """Return what came of all, when all pieces were taken.

        Raises:
            RuntimeError: some are not done, or have failed.
        """
        return self._stream.completions()

    def cancel(self, which: int) -> None:
        """End one of the completions as it is; the others go on."""
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
