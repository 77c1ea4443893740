"""Service: an engine, who asks it for what at the moment, and whether it may be asked at all."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from deepspeed_ext.inference.requests.async_stream import AsyncStream
from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.inference.serving.encoder_engine import EncoderEngine
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.server.body import Limits
from deepspeed_ext.server.errors import ApiError, wrong
from deepspeed_ext.server.fields import Fields, as_api_error
from deepspeed_ext.server.metrics import Metrics

_T = TypeVar("_T")
_PIECES = 64  # that one request gets before others get theirs


class Left(Exception):
    """The client is not there any more."""


class Service:
    """What the handlers of one server share; all of it belongs to one event loop.

    Args:
        name: of the model, for clients.
        limits: of requests.
        api_key: that clients have to give, or None.
    """

    def __init__(self, name: str, limits: Limits, api_key: str | None = None) -> None:
        self.name, self.limits, self._api_key = name, limits, api_key
        self.created = int(time.time())
        self.metrics = Metrics()
        self.is_closing = False
        self.running: set[Running] = set()
        self._engine: InferenceEngine | EncoderEngine | None = None
        self._pooling: Any = None
        self._encoding = asyncio.Lock()  # one at a time: each takes all processors, or the device
        self._encoded = 0  # texts, by requests that are under way

    def open(self, engine: InferenceEngine | EncoderEngine, pooling: Any = None) -> None:
        """Let requests come in.

        Args:
            engine: that answers them.
            pooling: of an encoder, which `encoded` passes on.
        """
        if engine.tokenizer is None:
            raise ValueError("serve: the engine has no tokenizer, expected one, for text")
        self._engine, self._pooling = engine, pooling

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered."""
        return self._engine is not None and not self.is_closing

    def check_ready(self) -> InferenceEngine | EncoderEngine:
        """Return the engine, whichever it is.

        Raises:
            ApiError: there is none yet, or no longer.
        """
        if self._engine is None or self.is_closing:
            what = "closing" if self.is_closing else "loading the model"
            raise ApiError(
                503, f"the server is {what}", code="unavailable", headers={"retry-after": "1"}
            )
        return self._engine

    @property
    def engine(self) -> InferenceEngine:
        """The engine, if it writes text.

        Raises:
            ApiError: it does not; as `check_ready`.
        """
        engine = self.check_ready()
        if not isinstance(engine, InferenceEngine):
            raise _other("writes no text, expected a request of /v1/embeddings")
        return engine

    @property
    def encoder(self) -> EncoderEngine:
        """The engine, if it is an encoder.

        Raises:
            ApiError: it is not; as `check_ready`.
        """
        engine = self.check_ready()
        if not isinstance(engine, EncoderEngine):
            raise _other("is no encoder, expected a request of completions")
        return engine

    async def encoded(
        self,
        work: Callable[[EncoderEngine, Any, Sequence[list[int]]], _T],
        texts: Sequence[list[int]],
    ) -> _T:
        """Return what work makes of the tokens of texts, by the encoder in another thread.

        Raises:
            ApiError: there are too many others.
        """
        engine = self.encoder
        self._check_others(self._encoded, len(texts), self.limits.waiting)
        self._encoded += len(texts)
        try:
            async with self._encoding:
                return await asyncio.to_thread(work, engine, self._pooling, texts)
        finally:
            self._encoded -= len(texts)

    @property
    def load(self) -> tuple[int, int]:
        """How many completions have a slot, and how many wait for one."""
        if isinstance(self._engine, InferenceEngine):
            return self._engine.load
        return min(self._encoded, 1), max(self._encoded - 1, 0)

    @property
    def card(self) -> dict[str, Any]:
        """What clients are told of the model."""
        card = {"id": self.name, "object": "model", "created": self.created}
        return card | {"owned_by": "deepspeed_ext"}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the engine."""
        return self.check_ready().tokenizer

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key."""
        if self._api_key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the API key is missing or wrong, expected Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def check_model(self, name: Any) -> None:
        """Refuse another model's name."""
        if not isinstance(name, str):
            raise wrong("model", name, f"{self.name!r}")
        if name != self.name:
            raise ApiError(
                404,
                f"model is {name!r:.100}, expected {self.name!r}",
                "model",
                "model_not_found",
            )

    def begin(self, prompts: Sequence[list[int]], fields: Fields, param: str) -> "Running":
        """Let the engine begin with what a request asks for.

        Args:
            prompts: their tokens.
            fields: of the request.
            param: the field that has the prompts.

        Raises:
            ApiError: it asks for what may not be, or there are too many others.
        """
        engine, limits = self.engine, self.limits
        options = [fields.for_prompt(engine.max_tokens - len(prompt)) for prompt in prompts]
        count = len(prompts) * fields.n
        if count > limits.completions:
            raise ApiError(
                400,
                f"{param} and n ask for {count} completions, expected at most {limits.completions}",
                "n" if fields.n > 1 else param,
            )
        others = sum(each.count for each in self.running)
        self._check_others(others, count, engine.max_batch + limits.waiting)
        try:
            stream = engine.stream(prompts, options)
        except (TypeError, ValueError) as error:
            raise as_api_error(error, param) from None
        self.metrics.tokens["prompt"] += sum(map(len, prompts))
        return Running(self, stream, count)

    @staticmethod
    def _check_others(others: int, count: int, most: int) -> None:
        if others and others + count > most:
            raise ApiError(
                429,
                f"{others} completions are under way, expected fewer to come back to",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )

    def give_up(self) -> None:
        """End all that is under way; who waits for it gets an error."""
        for each in self.running:
            each.stream.close()


class Running:
    """What one request has under way, from `Service.begin` to `end`."""

    def __init__(self, service: Service, stream: AsyncStream, count: int) -> None:
        self._service, self.stream, self.count = service, stream, count
        self._begin = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self.reasons: list[str] = []
        self.tokens = 0
        self._is_over = False
        service.running.add(self)

    async def some(self) -> list[Piece]:
        """Return pieces that have come since; none when all completions have ended.

        Raises:
            ApiError: they have failed, or the server has given them up.
        """
        try:
            pieces = await self.stream.some(_PIECES)
        except RuntimeError as error:
            self.end("failed")
            raise ApiError(500, str(error)) from error
        for piece in pieces:
            self._count(piece)
        if len(pieces) == _PIECES:
            await asyncio.sleep(0)  # nothing else waits where more is there, and the client reads
        if not pieces and len(self.reasons) < self.count:
            self.end("failed")
            raise ApiError(503, "the server is closing, and has ended what was under way")
        if not pieces:
            self.end("length" if "length" in self.reasons else "stop")
        return pieces

    async def completions(self) -> list[Completion]:
        """Return all completions."""
        while await self.some():
            pass
        return self.stream.completions()

    def _count(self, piece: Piece) -> None:
        metrics, count = self._service.metrics, len(piece.tokens)
        if count:
            now, key = time.perf_counter(), (piece.prompt, piece.sample)
            last = self._last.get(key)
            if last is None:
                metrics.first.add(now - self._begin)
                last, behind = now, count - 1  # which came with the first
            else:
                behind = count
            if behind:
                metrics.between.add((now - last) / behind, behind)
            self._last[key] = now
            metrics.tokens["completion"] += count
            self.tokens += count
        if piece.finish_reason is not None:
            self.reasons.append(piece.finish_reason)

    def end(self, how: str) -> None:
        """Let nothing be under way any more; only the first end counts."""
        if not self._is_over:
            self._is_over = True
            self.stream.close()
            self._service.running.discard(self)
            self._service.metrics.ends[how] += 1


def _other(what: str) -> ApiError:
    return ApiError(404, f"the model {what}", code="unknown_url")


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Return what work comes to, which is cancelled if the client leaves before.

    Raises:
        Left: the client has.
    """
    main = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({main, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            raise Left
        return main.result()
    finally:
        for task in (main, watch):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
