"""Completions as they come: an iterator of pieces."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from deepspeed_ext.inference.requests import Completion, Request


@dataclass(frozen=True)
class Piece:
    """What a completion goes on by.

    Args:
        prompt: its number in the call.
        sample: the number of the completion of that prompt.
        tokens: new ones.
        text: of which they are the whole characters, once it is sure that no stop string begins in
            them; "" without a tokenizer.
    """

    prompt: int
    sample: int
    tokens: list[int]
    text: str

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[Piece]):
    """The completions of one call, for one thread; put together, their pieces are all of each.

    Args:
        requests: of the call, their order that of the completions.
        advance: lets the engine compute a step, unless what it is given is true by then.
        sweep: lets the engine take back what was cancelled.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        advance: Callable[[Callable[[], bool]], None],
        sweep: Callable[[], None],
    ) -> None:
        self._requests, self._advance, self._sweep = list(requests), advance, sweep
        self._open = deque(requests)  # those that may have something to tell
        self._held: dict[Request, list[int]] = {}  # tokens whose text is not sure yet

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        try:
            while True:
                for _ in range(len(self._open)):
                    request = self._open.popleft()
                    was_done = request.is_done  # before what it has told is taken
                    piece = self._taken(request, was_done)
                    if not was_done:
                        self._open.append(request)
                    if piece is not None:
                        return piece
                self._raise_error()
                if not self._open:
                    raise StopIteration
                self.advance()
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise

    def _taken(self, request: Request, was_done: bool) -> Piece | None:
        """Return what a request has told since, or None if that is nothing to tell yet."""
        assert request.news is not None
        tokens, text = self._held.pop(request, []), ""
        while request.news:
            token, piece = request.news.popleft()
            tokens += [token] if token >= 0 else []
            text += piece
        if text or (tokens and (request.text is None or was_done)):
            return Piece(request.prompt.number, request.sample, tokens, text)
        if tokens:
            self._held[request] = tokens
        return None

    def advance(self) -> None:
        """Wait until there is more, or for one step."""
        self._advance(self._has_more)

    def _has_more(self) -> bool:
        return self.is_done or any(request.news for request in self._open)

    @property
    def is_done(self) -> bool:
        """Whether all are done, or one has failed."""
        return all(each.is_done for each in self._requests) or any(
            each.error for each in self._requests
        )

    def _raise_error(self) -> None:
        for request in self._requests:
            if request.error is not None:
                raise request.error

    def completions(self) -> list[Completion]:
        """Return what came of all, when all are done.

        Raises:
            RuntimeError: some are not, or have failed.
        """
        self._raise_error()
        if not self.is_done:
            raise RuntimeError("stream: completions are not done, expected all pieces to be taken")
        return [request.completion() for request in self._requests]

    def cancel(self, which: int) -> None:
        """End one of the completions as it is, from any thread; the others go on."""
        self._requests[which].cancelled = True

    def close(self) -> None:
        """End all as they are; their slots are free then."""
        self._flag()
        self._sweep()

    def _flag(self) -> None:
        for request in self._requests:
            request.cancelled = True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._flag()  # no more, as this may run within a step, or in any thread
