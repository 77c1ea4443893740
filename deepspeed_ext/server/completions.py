"""/v1/completions: prompts of text or tokens, and what follows them."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.server.answers import Answer, Events
from deepspeed_ext.server.fields import COMPLETION_FIELDS, Fields, fields_of
from deepspeed_ext.server.prompts import prompts_of, tokens_of
from deepspeed_ext.server.service import Service

_USUAL_MAX = 16  # tokens, as OpenAI's


class Completions(Answer):
    """The form of completions."""

    kind = chunk_kind = "text_completion"
    letters = "cmpl"

    def __init__(
        self,
        service: Service,
        fields: Fields,
        prompts: Sequence[list[int]],
        texts: Sequence[str | None],
    ) -> None:
        super().__init__(service, fields, prompts)
        self._texts = texts
        self._offsets: dict[int, int] = {}

    def _prompt_text(self, number: int) -> str:
        text = self._texts[number]
        return self.service.tokenizer.decode(self.prompts[number]) if text is None else text

    def choice(self, one: Completion) -> dict[str, Any]:
        before = self._prompt_text(one.prompt) if self.fields.echo else ""
        block = None
        if one.logprobs is not None and self.fields.echo:
            logprobs = [None, *(one.prompt_logprobs or []), *one.logprobs]
            tops = None
            if one.top_logprobs is not None:
                tops = [None, *(one.prompt_top_logprobs or []), *one.top_logprobs]
            block = self.words.block([*self.prompts[one.prompt], *one.tokens], logprobs, tops, 0)
        elif one.logprobs is not None:
            block = self.words.block(one.tokens, one.logprobs, one.top_logprobs, 0)
        return self._choice(self.index(one), before + (one.text or ""), block, one.finish_reason)

    def first_chunk(self, piece: Piece) -> dict[str, Any] | None:
        if not self.fields.echo:
            return None
        index, block = self.index(piece), None
        if piece.prompt_logprobs is not None:
            tokens, tops = self.prompts[piece.prompt], piece.prompt_top_logprobs
            all_tops = None if tops is None else [None, *tops]
            block = self.words.block(tokens, [None, *piece.prompt_logprobs], all_tops, 0)
            self._offsets[index] = sum(len(self.words.of(each)) for each in tokens)
        return self._choice(index, self._prompt_text(piece.prompt), block, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        index, block = self.index(piece), None
        if piece.logprobs is not None and piece.tokens:
            offset = self._offsets.get(index, 0)
            block = self.words.block(piece.tokens, piece.logprobs, piece.top_logprobs, offset)
            self._offsets[index] = offset + sum(len(self.words.of(each)) for each in piece.tokens)
        return self._choice(index, piece.text, block, piece.finish_reason)

    @staticmethod
    def _choice(index: int, text: str, block: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": block, "finish_reason": reason}


async def complete(
    service: Service, given: dict[str, Any], request: Request
) -> JSONResponse | Events:
    """Answer a request for completions."""
    fields = fields_of(given, COMPLETION_FIELDS, _USUAL_MAX)
    prompts = prompts_of("prompt", given.get("prompt"), service.limits.completions)
    texts = [each if isinstance(each, str) else None for each in prompts]
    tokens = await tokens_of(service.tokenizer, prompts, "prompt")
    return await Completions(service, fields, tokens, texts).to(request, "prompt")
