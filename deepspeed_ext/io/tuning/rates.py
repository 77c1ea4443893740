"""How fast something reads and writes, and which of several is the best."""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Contender = TypeVar("Contender", bound=Hashable)

_NOTICEABLE = 1.03  # less than this is noise, and the contender that was named first stays


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    read: float
    write: float

    @property
    def both(self) -> float:
        """The geometric mean, so that neither direction is given up for the other."""
        return math.sqrt(self.read * self.write)


def median(rounds: Sequence[Rates]) -> Rates:
    """Return the median of each direction."""
    return Rates(*(statistics.median(getattr(r, way) for r in rounds) for way in ("read", "write")))


def compare(
    contenders: Sequence[Contender],
    measure: Callable[[Contender], Rates],
    rounds: int,
    is_over: Callable[[], bool],
) -> dict[Contender, Rates]:
    """Measure contenders that take turns; another one begins each round.

    Args:
        contenders: what to measure.
        measure: measures one, once.
        rounds: how often.
        is_over: says that the time is used up; what has begun its first round is still finished.

    Returns:
        The medians, in the order of `contenders`.
    """
    found: dict[Contender, list[Rates]] = {contender: [] for contender in contenders}
    for first in range(rounds):
        if first and is_over():
            break
        first %= len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            found[contender].append(measure(contender))
    return {contender: median(rates) for contender, rates in found.items()}


def best_of(found: Mapping[Contender, Rates]) -> Contender:
    """Return the best; one named earlier stays unless another is noticeably better."""
    best, *others = found
    for other in others:
        if found[other].both > _NOTICEABLE * found[best].both:
            best = other
    return best
