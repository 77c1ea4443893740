"""The text of a completion as its tokens come: only what stays, and an end at stop strings."""

import re
from collections.abc import Callable, Sequence

_WINDOW = 8  # tokens that are made text of at a time, at least
_UNKNOWN = "\ufffd"  # what bytes become that are no character, such as the first ones of one
_LONGEST = 3  # bytes of a character that is not whole
_RARE = "\U0010fffd"  # a character that no vocabulary has, only its bytes
# Behind which transformers' clean_up_tokenization takes the space away: "." and "?", "n't", "'ve".
_SPACE = re.compile(r" (?:n'?|'[vr]?)?\Z")


class Detokenizer:
    """Makes text of tokens one by one.

    Text is what `decode` makes of all tokens at once, and pieces put together are that text: one is
    told when no token that may follow changes it. So the beginning of a character, a run of bytes
    that is unknown as a whole if it is not whole, and a space that punctuation may take away wait
    for what follows. That holds if what `decode` makes of some tokens does not depend on those long
    before, and if what follows changes nothing else of it; text that was told stays in any case.
    Only the last few tokens are decoded again with each.

    Args:
        decode: from tokens to text.
        stop: strings that end the text, and are no part of it.
        in_pieces: whether anybody wants to know before the end.
        run_byte: see `run_byte_of`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        *,
        in_pieces: bool,
        run_byte: int | None = None,
    ) -> None:
        self._decode, self._stop, self._run_byte = decode, stop, run_byte
        self._in_pieces = in_pieces or bool(stop)
        self._longest = max(map(len, stop), default=0)
        self._tokens: list[int] = []
        self._window = 0  # tokens before those that are decoded
        self._whole, self._mark = 0, (0, 0)  # where it may begin next; tokens, and where they end
        self._base, self._known = "", 0  # text before the window's, of which so much is in it
        self._last = ""  # what was known of the window's text before the last token
        self._sure = self._told = 0  # of the whole text
        self.value = ""
        self.stopped: str | None = None  # the string that the text ends at

    def add(self, token: int) -> str:
        """Return what is sure to follow what was returned before; "" is possible."""
        self._tokens.append(token)
        if not self._in_pieces:
            return ""
        text = self._decode(self._tokens[self._window :])
        unknown = len(text) - len(text.rstrip(_UNKNOWN))
        sure = self._sure_of(text, unknown)
        self._take(text, len(text) - unknown, sure)
        self._last = text[: len(text) - unknown]
        self._move(unknown)
        return self._tell(self._open_end())

    def finish(self) -> str:
        """Return all that was not returned before."""
        if self.stopped is None:
            text = self._decode(self._tokens[self._window :])
            self._take(text, len(text), len(text))
        return self._tell(0)

    def _sure_of(self, text: str, unknown: int) -> int:
        """Return how much of the window's text stays, whatever follows."""
        sure = _common(text, self._last)
        sure = len(text) if sure == len(self._last) else sure
        if self._run_byte is None:
            sure = min(sure, len(text) - min(unknown, _LONGEST))
        else:
            followed = self._decode([*self._tokens[self._window :], self._run_byte])
            sure = min(sure, len(text) - unknown, _common(text, followed))
        space = _SPACE.search(text)
        return sure if space is None else min(sure, space.start())

    def _take(self, text: str, known: int, sure: int) -> None:
        """Let the window's text be this, and look for stop strings in what is known of it."""
        if self.stopped is not None:
            return
        begin, before = max(0, self._sure - self._longest + 1), len(self._base) - self._known
        told, value = self.value[: self._told], self._base + text[self._known :]
        self.value = value if value.startswith(told) else told + value[len(told) :]
        self._sure = max(self._sure, before + sure)
        end = max(begin, before + known)
        found = [(at, s) for s in self._stop if (at := self.value.find(s, begin, end)) >= 0]
        if found:
            at, self.stopped = min(found)
            self.value, self._sure = self.value[:at], at

    def _move(self, unknown: int) -> None:
        """Let the window begin where tokens end whose text is sure, if it has become long."""
        tokens, end = self._mark
        if self._sure >= end:
            self._whole = tokens
        if self._whole > self._window and len(self._tokens) - self._window > _WINDOW:
            text, open_end = self._decode(self._tokens[self._whole :]), self.value[self._sure :]
            known = len(text) - len(open_end)
            if known > 0 and text.endswith(open_end):  # or the next token may lose its space
                self._window, self._base, self._known = self._whole, self.value[: self._sure], known
                self._last = text[: len(text) - unknown]
        if unknown == 0:
            self._mark = len(self._tokens), len(self.value)

    def _open_end(self) -> int:
        """Return how many of the last sure characters may be the beginning of a stop string."""
        if self.stopped is not None:
            return 0
        for n in range(min(self._longest - 1, self._sure), 0, -1):
            last = self.value[self._sure - n : self._sure]
            if any(stop.startswith(last) for stop in self._stop):
                return n
        return 0

    def _tell(self, kept: int) -> str:
        begin, self._told = self._told, max(self._sure - kept, self._told)
        return self.value[begin : self._told]


def run_byte_of(
    encode: Callable[[str], Sequence[int]], decode: Callable[[list[int]], str]
) -> int | None:
    """Return the token of a first byte, if such a one makes all bytes before it unknown; else None.

    That is so with a fallback to bytes, as Llama 2 has: a run of tokens that are bytes is text if
    it is nothing but whole characters, and else unknown, byte by byte.
    """
    try:
        tokens = list(encode(_RARE))
        texts = [decode(tokens[: end + 1]) for end in range(len(tokens))]
        first = next(i for i, text in enumerate(texts) if text.endswith(_UNKNOWN))
        whole = next(i for i, text in enumerate(texts) if text.endswith(_RARE))
        followed = decode([*tokens[: whole + 1], tokens[first]])
    except Exception:  # it has no bytes for what it does not know
        return None
    return None if followed.startswith(texts[whole]) else tokens[first]


def _common(text: str, other: str) -> int:
    """Return how many characters at the beginning of both are the same."""
    if text.startswith(other):  # as it mostly does
        return len(other)
    some = range(min(len(text), len(other)))
    return next((i for i in some if text[i] != other[i]), len(some))
