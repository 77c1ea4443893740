"""/v1/chat/completions: conversations, and what is answered."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.server.answers import Answer, Events
from deepspeed_ext.server.errors import ApiError, wrong
from deepspeed_ext.server.fields import CHAT_FIELDS, fields_of
from deepspeed_ext.server.service import Service

_PLAIN = {"role", "content", "name"}
_NOTHING = {"tool_calls", "function_call", "refusal", "audio"}  # of messages, if they are null


class Chats(Answer):
    """The form of chats."""

    kind, chunk_kind, letters = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, one: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": one.text or "", "refusal": None}
        block = None
        if one.logprobs is not None:
            block = self.words.content(one.tokens, one.logprobs, one.top_logprobs)
        reason = one.finish_reason
        return {
            "index": self.index(one),
            "message": message,
            "logprobs": block,
            "finish_reason": reason,
        }

    def first_chunk(self, piece: Piece) -> dict[str, Any] | None:
        return self._chunk(self.index(piece), {"role": "assistant", "content": ""}, None, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        block = None
        if piece.logprobs is not None and piece.tokens:
            block = self.words.content(piece.tokens, piece.logprobs, piece.top_logprobs)
        delta = {"content": piece.text} if piece.text or block else {}
        return self._chunk(self.index(piece), delta, block, piece.finish_reason)

    @staticmethod
    def _chunk(index: int, delta: Any, block: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": block, "finish_reason": reason}


async def chat(service: Service, given: dict[str, Any], request: Request) -> JSONResponse | Events:
    """Answer a request for a chat."""
    fields = fields_of(given, CHAT_FIELDS, None)
    messages = _messages_of(given.get("messages"))
    # In another thread, as a template may take seconds, and long texts do.
    tokens = await asyncio.to_thread(tokens_of, service.engine, messages)
    return await Chats(service, fields, [tokens]).to(request, "messages")


def tokens_of(engine: InferenceEngine, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a conversation, up to where the answer begins.

    Raises:
        ApiError: there is no template for it, or the template refuses it.
    """
    if not engine.has_chat_template:
        raise ApiError(
            400,
            "the model has no chat template, expected a request of /v1/completions",
            "messages",
            "no_chat_template",
        )
    try:
        return engine.chat_tokens(messages)[0]
    except ValueError as error:
        raise ApiError(400, f"messages are refused by the template: {error}", "messages") from None


def _messages_of(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "an array of messages, not empty")
    return [_message_of(f"messages[{i}]", each) for i, each in enumerate(value)]


def _message_of(at: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(at, value, "an object with role and content")
    for name in value:
        if name in _NOTHING and value[name] in (None, []):
            continue
        if name not in _PLAIN:
            raise ApiError(400, f"{at} has {name!r:.40}, expected role and content", at)
    if not isinstance(value.get("role"), str):
        raise wrong(f"{at}.role", value.get("role"), "a string")
    found = {"role": value["role"], "content": _text_of(f"{at}.content", value.get("content"))}
    if isinstance(value.get("name"), str):
        found["name"] = value["name"]
    return found


def _text_of(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(at, content, "text, or an array of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{at}[{i}].type", kind, "'text', with text")
        texts.append(part["text"])
    return "".join(texts)
