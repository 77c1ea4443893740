"""Completions as they come: an iterator of pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed_ext.inference.requests.request import Call, Completion, Request


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
        call: its requests.
        advance: lets the engine compute a step, unless what it is given is true by then.
        cancel: notes that a request is to end as it is.
        sweep: lets the engine end what was cancelled, unless what it is given is true by then.
    """

    def __init__(
        self,
        call: Call,
        advance: Callable[[Callable[[], bool]], None],
        cancel: Callable[[Request], None],
        sweep: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._call, self._advance, self._cancel, self._sweep = call, advance, cancel, sweep
        self._is_closed = False
        self._held: dict[Request, list[int]] = {}  # tokens whose text is not sure yet

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        call = self._call
        while not self._is_closed:
            is_last = call.open == 0  # before it is looked what they have told
            while call.ready:
                piece = self._taken(call.ready.popleft())
                if piece is not None:
                    return piece
            if call.error is not None:
                self.close()
                raise call.error
            if is_last:
                break
            self.advance()
        raise StopIteration

    def _taken(self, request: Request) -> Piece | None:
        """Return what a request has told since, or None if that is nothing to tell yet."""
        assert request.news is not None
        was_done = request.is_done  # before what it has told is taken
        tokens, text = self._held.pop(request, []), ""
        while request.news:
            token, piece = request.news.popleft()
            tokens += [token] if token >= 0 else []
            text += piece
        if text or (tokens and (request.detokenizer is None or was_done)):
            return Piece(request.prompt.number, request.sample, tokens, text)
        if tokens:
            self._held[request] = tokens
        return None

    def advance(self) -> None:
        """Wait until there is more, or for one step."""
        try:
            self._advance(lambda: self.is_done or bool(self._call.ready))
        except BaseException:
            self.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether all are done, or one has failed."""
        return self._call.open == 0 or self._call.error is not None

    def completions(self) -> list[Completion]:
        """Return what came of all, when all are done, or when the stream is closed.

        Raises:
            RuntimeError: some are not, or have failed.
        """
        if self._is_closed and not self.is_done:
            self._sweep(lambda: self.is_done)
        if self._call.error is not None:
            raise self._call.error
        if not self.is_done:
            raise RuntimeError("stream: completions are not done, expected all pieces to be taken")
        return [request.completion() for request in self._call.requests]

    def cancel(self, which: int) -> None:
        """End one of the completions as it is, from any thread; the others go on."""
        self._cancel(self._call.requests[which])

    def close(self) -> None:
        """End all as they are; there are no more pieces.

        It waits for nobody, and may be called anywhere, within a step, too: the next step of the
        engine, in whichever thread, begins with taking their slots back.
        """
        self._is_closed = True
        if self._call.open > 0:
            for request in self._call.requests:
                self._cancel(request)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
