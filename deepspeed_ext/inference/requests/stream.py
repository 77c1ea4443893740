"""Completions as they come: an iterator of pieces."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed_ext.inference.execution.sampling import int_of
from deepspeed_ext.inference.requests.request import Call, Completion, FinishReason, Request


@dataclass(frozen=True)
class Piece:
    """What a completion goes on by.

    Args:
        prompt: its number in the call.
        sample: the number of the completion of that prompt.
        tokens: new ones.
        text: of which they are the whole characters, once it is sure that no stop string begins in
            them; "" without a tokenizer.
        logprobs: of the tokens, or None if they were not asked for; see `Completion`.
        top_logprobs: likewise.
        finish_reason: of the last piece of a completion of an `AsyncStream`, which may have nothing
            else; None elsewhere.
        prompt_logprobs: of the first piece of a completion; see `Completion`.
        prompt_top_logprobs: likewise.
    """

    prompt: int
    sample: int
    tokens: list[int]
    text: str
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[Piece]):
    """The completions of one call, for one thread; put together, their pieces are all of each.

    Args:
        call: its requests.
        advance: lets the engine compute a step, unless what it is given is true by then.
        cancel: notes that a request is to end as it is.
        sweep: lets the engine end what was cancelled, unless what it is given is true by then.
        tells_ends: whether the last piece of each completion says so.
    """

    def __init__(
        self,
        call: Call,
        advance: Callable[[Callable[[], bool]], None],
        cancel: Callable[[Request], None],
        sweep: Callable[[Callable[[], bool]], None],
        tells_ends: bool = False,
    ) -> None:
        self._call, self._advance, self._cancel, self._sweep = call, advance, cancel, sweep
        self._is_closed = False
        self._held: dict[Request, list[int]] = {}  # tokens whose text is not sure yet
        self._told: dict[Request, int] = {}  # tokens that were in pieces
        self._late: deque[Request] = deque()  # those that come after all others
        self._tells_ends, self._ended = tells_ends, set[Request]()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        while True:
            piece = self.take()
            if piece is not None:
                return piece
            if self._is_closed:
                raise StopIteration
            self.advance()

    def take(self) -> Piece | None:
        """Return the next piece that is there; None if none is, or none will be: it is closed then.

        Raises:
            RuntimeError: a completion has failed.
        """
        call = self._call
        if self._is_closed:
            return None
        is_last = call.open == 0  # before it is looked what they have told
        while call.ready or (is_last and self._late):
            piece = self._taken((call.ready or self._late).popleft())
            if piece is not None:
                return piece
        if call.error is not None:
            self.close()
            raise call.error
        if is_last:
            self.close()
        return None

    def _taken(self, request: Request) -> Piece | None:
        """Return what a request has told since, or None if that is nothing to tell yet."""
        assert request.news is not None
        if self._call.open > 0 and self._lacks_prompt(request):
            self._late.append(request)
            return None
        was_done = request.is_done  # before what it has told is taken
        tokens, text = self._held.pop(request, []), ""
        while request.news:
            token, piece = request.news.popleft()
            tokens += [token] if token >= 0 else []
            text += piece
        reason = request.finish_reason if was_done and self._tells_ends else None
        if reason is not None and request in self._ended:
            return None
        if text or reason or (tokens and (request.detokenizer is None or was_done)):
            return self._piece(request, tokens, text, reason)
        if tokens:
            self._held[request] = tokens
        return None

    def _lacks_prompt(self, request: Request) -> bool:
        """Whether a request without new tokens is done before what is told of its prompt is."""
        prompt, is_asked = request.prompt, request.options.prompt_logprobs is not None
        return is_asked and request.is_done and len(prompt.logprobs) < len(prompt.tokens) - 1

    def _piece(
        self, request: Request, tokens: list[int], text: str, reason: FinishReason | None
    ) -> Piece:
        is_first, begin = request not in self._told, self._told.get(request, 0)
        of_prompt = request.options.prompt_logprobs if is_first else None
        end = self._told[request] = begin + len(tokens)
        wants = request.options.logprobs
        if reason is not None:
            self._ended.add(request)
        return Piece(
            request.prompt.number,
            request.sample,
            tokens,
            text,
            None if wants is None else request.logprobs[begin:end],
            None if not wants else request.top_logprobs[begin:end],
            reason,
            None if of_prompt is None else request.prompt.logprobs,
            None if not of_prompt else request.prompt.top_logprobs,
        )

    @property
    def is_closed(self) -> bool:
        """Whether there are no more pieces."""
        return self._is_closed

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
        """End one of the completions as it is, from any thread; the others go on.

        Raises:
            TypeError, ValueError: there is none of this number.
        """
        number, count = int_of(which), len(self._call.requests)
        if number is None:
            raise TypeError(f"stream: which is {which!r:.60}, expected an int")
        if not 0 <= number < count:
            want = f"0 to {count - 1}" if count else "none, as there are no completions"
            raise ValueError(f"stream: which is {number}, expected {want}")
        self._cancel(self._call.requests[number])

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
