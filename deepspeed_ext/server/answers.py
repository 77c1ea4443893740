"""What all answers have in common: whole, or as events."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.server.errors import ApiError
from deepspeed_ext.server.fields import Fields
from deepspeed_ext.server.service import Left, Running, Service, while_connected
from deepspeed_ext.server.words import Words

_Message = MutableMapping[str, Any]
_Events = AsyncGenerator[bytes, None]
_DONE = b"data: [DONE]\n\n"


class Answer:
    """The answer to a request, in one of the forms below.

    Args:
        service: that answers.
        fields: of the request.
        prompts: their tokens.
    """

    kind, chunk_kind, letters = "", "", ""

    def __init__(self, service: Service, fields: Fields, prompts: Sequence[list[int]]) -> None:
        self.service, self.fields, self.prompts = service, fields, prompts
        self.words, self._n = Words(service.tokenizer), fields.n
        self._id = f"{self.letters}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def choice(self, one: Completion) -> dict[str, Any]:
        """Return a completion as a choice."""
        raise NotImplementedError

    def first_chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return what comes before the first piece of a choice."""
        raise NotImplementedError

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return a piece of a choice."""
        raise NotImplementedError

    def index(self, of: Completion | Piece) -> int:
        """Return the number of a choice."""
        return of.prompt * self._n + of.sample

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created}
        return head | {"model": self.service.name, "choices": choices}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    async def to(self, request: Request, param: str) -> "JSONResponse | Events":
        """Return the response to a request.

        Args:
            request: whose client is watched.
            param: the field that has the prompts.
        """
        running = self.service.begin(self.prompts, self.fields, param)
        try:
            if not self.fields.stream:
                found = await while_connected(request, running.completions())
                usage = self._usage(sum(len(one.tokens) for one in found))
                head = self._head(self.kind, [self.choice(one) for one in found])
                return JSONResponse(head | {"usage": usage})
            events = self._events(running)
            first = await while_connected(request, anext(events))  # what fails before is no event
        except BaseException:
            running.end("left")  # as it may not have begun
            raise
        return Events(request, first, events)

    async def _events(self, running: Running) -> _Events:
        """Yield events: all that are there at a time."""
        begun = set[int]()
        counted = {"usage": None} if self.fields.include_usage else {}
        empty = json.dumps(self._head(self.chunk_kind, []) | counted)
        head, field, tail = empty.partition('"choices": [')  # no name has it: its quotes are \\"
        before, behind = f"data: {head}{field}", f"{tail}\n\n"
        try:
            while pieces := await running.some():
                choices = list[Any]()
                for piece in pieces:
                    index = self.index(piece)
                    first = None if index in begun else self.first_chunk(piece)
                    begun.add(index)
                    choices += [self.chunk(piece)] if first is None else [first, self.chunk(piece)]
                yield "".join(f"{before}{json.dumps(each)}{behind}" for each in choices).encode()
            last = b""
            if self.fields.include_usage:
                usage = {"usage": self._usage(running.tokens)}
                last = _event_of(self._head(self.chunk_kind, []) | usage)
            yield last + _DONE
        finally:
            running.end("left")


def _event_of(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class Events:
    """A response of server-sent events, which ends when the client leaves.

    Args:
        request: that it is the response to.
        first: of the events, as they are sent.
        others: the rest of them.
    """

    def __init__(self, request: Request, first: bytes, others: _Events) -> None:
        self._request, self._first, self._others = request, first, others

    async def __call__(
        self, scope: _Message, receive: Any, send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        try:
            await while_connected(self._request, self._send_all(send))
        except Left:
            pass
        finally:
            await self._others.aclose()

    async def _send_all(self, send: Callable[[_Message], Awaitable[None]]) -> None:
        async def tell(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await tell(self._first)
            async for some in self._others:
                await tell(some)
        except ApiError as error:
            await tell(_event_of(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
