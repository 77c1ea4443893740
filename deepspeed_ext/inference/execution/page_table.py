"""Which pages each slot of a cache has: numbers on the host, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.ops.attention.paged_kv import PAGE


@dataclass(frozen=True)
class Change:
    """What a reservation changes for one slot.

    Args:
        slot: of the cache.
        length: tokens that it has then.
        pages: those that it has then.
        copied: the shared page that its last one is to be a copy of, or None.
    """

    slot: int
    length: int
    pages: list[int]
    copied: int | None


class PageTable:
    """The pages of each slot, and how many slots have each page.

    Args:
        slots: how many.
        capacity: tokens of a slot at most.
        pages: for all slots together.
    """

    def __init__(self, slots: int, capacity: int, pages: int) -> None:
        self.capacity = capacity
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.lengths = [0] * slots
        self.used = [False] * slots  # since it was last free
        self.free = list(range(pages - 1, -1, -1))  # the next one at the end
        self.holders = [0] * pages

    def check_slot(self, op: str, slot: int, in_use: bool | None = None) -> None:
        """Raise unless there is such a slot, and it is in use or free as wanted."""
        if isinstance(slot, bool) or not isinstance(slot, int):
            raise TypeError(f"kv_cache.{op}: slot is {slot!r}, expected an int")
        if not 0 <= slot < len(self.tables):
            raise ValueError(f"kv_cache.{op}: slot is {slot}, expected 0 to {len(self.tables) - 1}")
        if in_use is not None and self.used[slot] != in_use:
            states = ("free", "in use")
            raise ValueError(
                f"kv_cache.{op}: slot {slot} is {states[self.used[slot]]},"
                f" expected one that is {states[in_use]}"
            )

    def plan(self, slots: Sequence[int], counts: Sequence[int]) -> list[Change]:
        """Return what reserving takes; nothing is changed, so that all of it happens or none."""
        if len(set(slots)) != len(slots):
            raise ValueError(f"kv_cache.reserve: slots are {list(slots)}, expected no slot twice")
        for slot, count in zip(slots, counts, strict=True):
            self._check_count(slot, count)
        taken = 0  # of the free pages
        given_up: dict[int, int] = {}  # of a shared page, how many holders it loses to copies
        changes = []
        for slot, count in zip(slots, counts, strict=True):
            length, pages, copied = self.lengths[slot], self.tables[slot], None
            if count > 0 and length % PAGE > 0:  # it writes to its last page
                last = pages[-1]
                if self.holders[last] - given_up.get(last, 0) > 1:
                    given_up[last] = given_up.get(last, 0) + 1
                    copied = last
                    pages = pages[:-1]
            wanted = -(-(length + count) // PAGE) - len(pages)
            if wanted <= 0:  # most steps are such, and a slot may have many pages
                changes.append(Change(slot, length + count, pages, copied))
                continue
            left = len(self.free) - taken
            if wanted > left:
                raise RuntimeError(
                    f"kv_cache.reserve: slot {slot} has length {length} and is in need of"
                    f" {wanted} pages for {count} more tokens, expected at most {left} of"
                    f" {len(self.holders)}, as the others are taken; free or truncate slots,"
                    " or make the cache with more pages"
                )
            more = [self.free[-taken - 1 - i] for i in range(wanted)]
            taken += wanted
            changes.append(Change(slot, length + count, pages + more, copied))
        return changes

    def _check_count(self, slot: int, count: int) -> None:
        self.check_slot("reserve", slot)
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"kv_cache.reserve: n is {count!r}, expected an int")
        if count < 0:
            raise ValueError(f"kv_cache.reserve: n is {count}, expected 0 or more")
        length = self.lengths[slot]
        if length + count > self.capacity:
            raise ValueError(
                f"kv_cache.reserve: slot {slot} has length {length} and is to have {count} more,"
                f" expected at most its capacity, {self.capacity}"
            )

    def set(self, slot: int, length: int, pages: list[int]) -> None:
        """Give a slot these pages, and take those away that it had."""
        if pages is self.tables[slot]:  # which nobody changes
            self.lengths[slot], self.used[slot] = length, True
            return
        for page in pages:
            self.holders[page] += 1
            if self.holders[page] == 1:
                self.free.remove(page) if self.free[-1] != page else self.free.pop()
        for page in self.tables[slot]:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)
        self.tables[slot], self.lengths[slot], self.used[slot] = pages, length, True
