"""Tokens and their log-probabilities as clients read them."""

import math
from collections.abc import Sequence
from typing import Any

_LEAST = -9999.0  # for minus infinity, which JSON has not
Top = Sequence[tuple[int, float]]


class Words:
    """The text of single tokens.

    Args:
        tokenizer: of the engine.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Return the text of one token, alone."""
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def block(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Top | None] | None,
        offset: int,
    ) -> dict[str, Any]:
        """Return log-probabilities in the form of completions.

        A token is as likely as the likeliest if and only if that is the token itself.

        Args:
            tokens: in their order.
            logprobs: of each; None for the first of a text.
            tops: the likeliest in each place, or None.
            offset: characters before them.
        """
        told, top_told, offsets = list[float | None](), list[dict[str, float] | None](), list[int]()
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = None if tops is None else tops[i]
            value = None if logprob is None else below_the_likeliest(token, logprob, top)
            told.append(value)
            top_told.append(None if not top or value is None else self._by_text(token, value, top))
            offsets.append(offset)
            offset += len(self.of(token))
        return {
            "tokens": [self.of(token) for token in tokens],
            "token_logprobs": told,
            "top_logprobs": None if tops is None else top_told,
            "text_offset": offsets,
        }

    def _by_text(self, token: int, logprob: float, top: Top) -> dict[str, float]:
        """Return the likeliest by their text, and the token itself; none hides another one."""
        found = {self.of(token): logprob}
        for other, value in top:
            if other != token:
                text = self.of(other)
                found[f"token_id:{other}" if text in found else text] = max(value, _LEAST)
        return found

    def content(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top] | None
    ) -> dict[str, Any]:
        """Return log-probabilities in the form of chats."""
        content = []
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = [] if tops is None else [self._entry(*each) for each in tops[i]]
            content.append(self._entry(token, logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.of(token)
        whole = list(text.encode(errors="replace"))
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": whole}


def below_the_likeliest(token: int, logprob: float, top: Top | None) -> float:
    """Return a log-probability, a trifle less if it is that of the likeliest, which is another."""
    if top and token != top[0][0] and logprob >= top[0][1]:
        logprob = math.nextafter(top[0][1], -math.inf)
    return max(logprob, _LEAST)
