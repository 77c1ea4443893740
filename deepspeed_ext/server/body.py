"""From the bytes of a request to an object, within limits."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from deepspeed_ext.server.checks import check_count, check_seconds
from deepspeed_ext.server.errors import ApiError

_PARTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Args:
        body_bytes: of a request.
        depth: of the arrays and objects in it.
        completions: of a request: prompts times n.
        waiting: completions that may wait for a slot, of all requests.
        body_seconds: without a byte of a body that has begun.
        send_seconds: in which a client takes nothing of what is sent, after which it has left.

    Raises:
        TypeError, ValueError: one is no number, or none that bounds anything.
    """

    body_bytes: int = 8 << 20
    depth: int = 16
    completions: int = 256
    waiting: int = 1024
    body_seconds: float = 10.0
    send_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_count("body_bytes", self.body_bytes, 1, 1 << 40)
        for name, least in (("depth", 1), ("completions", 1), ("waiting", 0)):
            check_count(name, getattr(self, name), least, 2**31 - 1)
        for name in ("body_seconds", "send_seconds"):
            check_seconds(name, getattr(self, name), 0.001, 1e6)  # 0 is no limit for a socket


async def object_of(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the JSON object that a request has.

    Raises:
        ApiError: there is none, or it breaks a limit.
    """
    raw = await _bytes_of(request, limits)
    depth = deepest = 0
    for part in _PARTS.finditer(raw):
        sign = part.group()
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        deepest = max(deepest, depth)
    if deepest > limits.depth:
        raise ApiError(400, f"the body is {deepest} deep, expected at most {limits.depth}")
    try:
        found = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no object, expected one with fields")
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


async def _bytes_of(request: Request, limits: Limits) -> bytes:
    too_long = ApiError(413, f"the body is too long, expected at most {limits.body_bytes} bytes")
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and (len(said) > 18 or int(said) > limits.body_bytes):
        raise too_long
    found = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body had no byte for {limits.body_seconds:g} s, expected {said} in all",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has left")
        found += message.get("body", b"")
        if len(found) > limits.body_bytes:
            raise too_long
        if not message.get("more_body", False):
            return bytes(found)
