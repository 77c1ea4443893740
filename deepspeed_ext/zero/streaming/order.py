"""In which order blocks were wanted, and which is likely to come next."""

import itertools
import weakref
from collections.abc import Iterable

from torch import nn


class Order:
    """Blocks in the order of the last pass. Another order is slower, not wrong.

    Args:
        blocks: in the order of the model.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        known = list(blocks)
        self._next: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
        self._next = weakref.WeakKeyDictionary()
        for block, after in itertools.pairwise(known):
            self._next[block] = weakref.ref(after)
        self._last: weakref.ref[nn.Module] | None = None

    def begin(self) -> None:
        """Take note that a pass begins: what comes now, came after nothing."""
        self._last = None

    def note(self, block: nn.Module) -> None:
        """Take note of what is wanted now."""
        last = None if self._last is None else self._last()
        if last is not None and last is not block:
            self._next[last] = weakref.ref(block)
        self._last = weakref.ref(block)

    def after(self, block: nn.Module, most: int) -> list[nn.Module]:
        """Return what is likely to be wanted next, at most so many."""
        found: list[nn.Module] = []
        known = self._next.get(block)
        while known is not None and len(found) < most:
            following = known()
            if following is None or following is block or following in found:
                break
            found.append(following)
            known = self._next.get(following)
        return found
