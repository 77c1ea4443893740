"""Prompts of requests: text or tokens, alone or several."""

import asyncio
from collections.abc import Sequence
from typing import Any

from deepspeed_ext.server.errors import ApiError, wrong
from deepspeed_ext.server.fields import as_api_error

Prompt = str | list[int]
LONG = 1 << 14  # characters that are made tokens of in another thread
_EXPECTED = "text, tokens, or an array of either, not empty"


def prompts_of(param: str, value: Any, most: int) -> list[Prompt]:
    """Return the prompts that a field has.

    Raises:
        ApiError: it has something else, or more than may be.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong(param, value, _EXPECTED)
    if type(value[0]) is int:
        value = [value]
    if len(value) > most:
        raise ApiError(400, f"{param} has {len(value)} prompts, expected at most {most}", param)
    for each in value:
        are_tokens = isinstance(each, list) and set(map(type, each)) <= {int}
        if not isinstance(each, str) and not are_tokens:
            raise wrong(param, value, _EXPECTED)
    found: list[Prompt] = value
    return found


async def tokens_of(tokenizer: Any, prompts: Sequence[Prompt], param: str) -> list[list[int]]:
    """Return the tokens of prompts; those of long texts are made in another thread.

    Raises:
        ApiError: a text has none.
    """
    try:
        if sum(len(each) for each in prompts if isinstance(each, str)) > LONG:
            return await asyncio.to_thread(_encoded, tokenizer, prompts)
        return _encoded(tokenizer, prompts)
    except (TypeError, ValueError) as error:
        raise as_api_error(error, param) from None


def _encoded(tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [list(tokenizer.encode(each)) if isinstance(each, str) else each for each in prompts]
