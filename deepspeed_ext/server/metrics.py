"""What the server has done, in the text form of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

_PREFIX = "deepspeed_ext_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """How many values were up to which bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(_SECONDS, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """All that is counted, by one thread."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()  # requests: stop, length, refused, failed, left
        self.tokens: Counter[str] = Counter()  # prompt, completion
        self.first, self.between = Histogram(), Histogram()

    def text(self, running: int, waiting: int) -> str:
        """Return all of it.

        Args:
            running: completions that have a slot.
            waiting: those that have none yet.
        """
        lines = [*self._counted("requests_total", "requests by how they ended", "end", self.ends)]
        lines += self._counted(
            "tokens_total", "tokens of prompts and completions", "of", self.tokens
        )
        for name, text, value in (
            ("running", "completions with a slot", running),
            ("waiting", "completions that wait for one", waiting),
        ):
            lines += [*_head(name, text, "gauge"), f"{_PREFIX}{name} {value}"]
        for name, text, histogram in (
            ("first_token_seconds", "from a request to its first token", self.first),
            ("next_token_seconds", "from a token to the next one", self.between),
        ):
            lines += [*_head(name, text, "histogram"), *histogram.lines(f"{_PREFIX}{name}")]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _counted(name: str, text: str, label: str, counter: Counter[str]) -> Iterator[str]:
        yield from _head(name, text, "counter")
        for what, count in sorted(counter.items()):
            yield f'{_PREFIX}{name}{{{label}="{what}"}} {count}'


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"
