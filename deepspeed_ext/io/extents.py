"""Which parts of a file are taken: extents of whole pages, best fit, neighbours merged."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

PAGE = 4096


class Extent(NamedTuple):
    """A part of a file, in bytes; both are multiples of PAGE."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The offset of the byte behind it."""
        return self.offset + self.nbytes


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that nbytes need."""
    return -(-nbytes // PAGE) * PAGE


class Extents:
    """The taken and the free extents of a file from its start to `end`, with no gap and no overlap.

    It only counts; its owner makes the file longer and shorter. It belongs to one thread at a time.
    Ctrl-C may come in the middle of a call. What is taken, and the end, change at once; what is
    free follows from them, and is found anew by the next call then.

    Args:
        taken: what is in use from the start, in any order; the file ends with the last of them.

    Raises:
        ValueError: two of them overlap, or one is not of whole pages.
    """

    def __init__(self, taken: Iterable[Extent] = ()) -> None:
        self.end = 0
        self._taken: dict[int, Extent] = {}
        for extent in sorted(taken):
            if extent.offset % PAGE or extent.nbytes % PAGE or extent.nbytes <= 0:
                raise ValueError(f"extents: extent is {extent}, expected whole pages of {PAGE}")
            if extent.offset < self.end:
                raise ValueError(f"extents: {extent} overlaps what ends at {self.end}")
            self.end = extent.end
            self._taken[extent.offset] = extent
        self._find_free()

    @property
    def tail(self) -> int:
        """Bytes that are free at the end of the file."""
        self._settle()
        last = self._free_to.get(self.end)
        return last.nbytes if last else 0

    def take(self, nbytes: int) -> Extent | None:
        """Take the smallest free extent that holds nbytes, the first of equals; None if none does.

        What is left over of it stays free. A taken extent has whole pages, at least one.
        """
        self._settle()
        need = whole_pages(max(nbytes, 1))
        index = bisect_left(self._free, (need, 0))
        if index == len(self._free):
            return None
        free = Extent(self._free[index][1], self._free[index][0])
        taken = Extent(free.offset, need)
        self._is_settled = False
        self._taken[taken.offset] = taken
        self._remove(free)
        if free.nbytes > need:
            self._insert(Extent(free.offset + need, free.nbytes - need))
        self.used += need
        self._is_settled = True
        return taken

    def give_back(self, extent: Extent) -> None:
        """Free a taken extent and merge it with its free neighbours."""
        if self._taken.get(extent.offset) != extent:
            raise ValueError(f"extents: {extent} is not taken")
        self._settle()
        self._is_settled = False
        del self._taken[extent.offset]
        self.used -= extent.nbytes
        before = self._free_to.get(extent.offset)
        after = self._free_at.get(extent.end)
        for neighbour in (before, after):
            if neighbour is not None:
                self._remove(neighbour)
        start = before.offset if before else extent.offset
        end = after.end if after else extent.end
        self._insert(Extent(start, end - start))
        self._is_settled = True

    def missing(self, nbytes: int) -> int:
        """Return by how many bytes the file has to grow, so that one free extent holds nbytes."""
        self._settle()
        need = whole_pages(max(nbytes, 1))
        largest = self._free[-1][0] if self._free else 0
        return 0 if largest >= need else need - self.tail

    def grow(self, nbytes: int) -> None:
        """Count nbytes, whole pages, that the file has become longer; they are free."""
        if nbytes == 0:
            return
        self._settle()
        last = self._free_to.get(self.end)
        start = self.end
        self._is_settled = False
        self.end += nbytes
        if last is not None:
            self._remove(last)
            start = last.offset
        self._insert(Extent(start, self.end - start))
        self._is_settled = True

    def cut(self, nbytes: int) -> None:
        """Count nbytes, whole pages of the tail, that the file has become shorter."""
        self._settle()
        last = self._free_to.get(self.end)
        if nbytes == 0:
            return
        if last is None or nbytes > last.nbytes:
            raise ValueError(f"extents: cut of {nbytes} bytes, expected at most {self.tail}")
        self._is_settled = False
        self.end -= nbytes
        self._remove(last)
        if last.offset < self.end:
            self._insert(Extent(last.offset, self.end - last.offset))
        self._is_settled = True

    def _settle(self) -> None:
        if not self._is_settled:
            self._find_free()

    def _find_free(self) -> None:
        """Find out what is free, from what is taken and the end."""
        self._is_settled = False
        self.used = sum(extent.nbytes for extent in self._taken.values())
        self._free: list[tuple[int, int]] = []  # (nbytes, offset): bisection finds the best fit
        self._free_at: dict[int, Extent] = {}  # the same by offset, and by end, to merge neighbours
        self._free_to: dict[int, Extent] = {}
        begin = 0
        for extent in [*sorted(self._taken.values()), Extent(self.end, 0)]:
            if extent.offset > begin:
                self._insert(Extent(begin, extent.offset - begin))
            begin = extent.end
        self._is_settled = True

    def _insert(self, extent: Extent) -> None:
        insort(self._free, (extent.nbytes, extent.offset))
        self._free_at[extent.offset] = extent
        self._free_to[extent.end] = extent

    def _remove(self, extent: Extent) -> None:
        del self._free[bisect_left(self._free, (extent.nbytes, extent.offset))]
        del self._free_at[extent.offset]
        del self._free_to[extent.end]
