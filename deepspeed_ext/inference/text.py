"""The text of a completion as its tokens come: no half characters, and an end at stop strings."""

from collections.abc import Callable, Sequence

_WINDOW = 8  # tokens that are made text of at a time, at least
_UNKNOWN = "\ufffd"  # what bytes become that are no character, such as the first ones of one
_LONGEST = 3  # bytes of a character that is not whole, and tokens, as each has one at least


class Text:
    """Makes text of tokens one by one.

    Text is what `decode` makes of all tokens at once, if what it makes of some of them does not
    depend on those long before; only the last few are decoded again with each token. A character
    that is told as it is, and unknown beside the bytes of the next one, such as a literal U+FFFD
    with a fallback to bytes, may be told wrongly.

    Args:
        decode: from tokens to text.
        stop: strings that end the text, and are no part of it.
        in_pieces: whether anybody wants to know before the end.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, in_pieces: bool
    ) -> None:
        self._decode, self._stop = decode, stop
        self._in_pieces = in_pieces or bool(stop)
        self._longest = max(map(len, stop), default=0)
        self._tokens: list[int] = []
        self._window = self._whole = 0  # tokens before those to decode, and before the last ones
        self._taken = 0  # of the window's text
        self._told = 0  # of the whole text
        self.value = ""
        self.stopped: str | None = None  # the string that the text ends at

    def add(self, token: int) -> str:
        """Return what is sure to follow what was returned before; "" is possible."""
        self._tokens.append(token)
        if not self._in_pieces:
            return ""
        text = self._decode(self._tokens[self._window :])
        unknown = len(text) - len(text.rstrip(_UNKNOWN))
        if len(self._tokens) - self._whole > _LONGEST:
            self._take(text[: len(text) - min(unknown, _LONGEST)])  # no character begins before
        else:  # for a fallback to bytes, what was whole is unknown, too, until the next one is
            self._take(text[: len(text) - unknown])
        if unknown == 0:
            self._taken = min(self._taken, len(text))  # what was told wrongly eats nothing after it
            if len(self._tokens) - self._window > _WINDOW:
                begin = len(self._decode(self._tokens[self._whole :]))
                if begin > 0:  # or the next token would be the first one, and lose its space
                    self._window, self._taken = self._whole, begin
            self._whole = len(self._tokens)
        return self._tell(self._open_end())

    def finish(self) -> str:
        """Return all that was not returned before."""
        if self.stopped is None:
            self._take(self._decode(self._tokens[self._window :]))
        return self._tell(0)

    def _take(self, text: str) -> None:
        """Add what the text of the window has more than before, and look for stop strings."""
        if len(text) <= self._taken or self.stopped is not None:
            return
        begin = max(0, len(self.value) - self._longest + 1)
        self.value += text[self._taken :]
        self._taken = len(text)
        found = [(at, stop) for stop in self._stop if (at := self.value.find(stop, begin)) >= 0]
        if found:
            at, self.stopped = min(found)
            self.value = self.value[:at]

    def _open_end(self) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        if self.stopped is not None:
            return 0
        for n in range(min(self._longest - 1, len(self.value)), 0, -1):
            if any(stop.startswith(self.value[-n:]) for stop in self._stop):
                return n
        return 0

    def _tell(self, kept: int) -> str:
        end = len(self.value) - kept
        begin, self._told = self._told, max(end, self._told)
        return self.value[begin:end]
