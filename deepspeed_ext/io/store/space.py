"""The data file of a tensor store: extents with holders, growth that is checked, an end cut off."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterable
from typing import Any

from deepspeed_ext.io.extents import Extent, Extents, whole_pages

_MOST_AHEAD = 64 << 20  # bytes by which a file grows before they are asked for


class Slot:
    """A taken extent and who needs it: `owners` (a name, a commit) and requests under way.

    It is overwritten only while one owner and no request has it, and freed when nobody has.
    """

    __slots__ = ("extent", "is_free", "owners", "users")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.is_free = False
        self.owners = 0
        self.users: set[Any] = set()

    def can_be(self, nbytes: int) -> bool:
        """Tell whether its only owner may put these bytes into it, once it has no users."""
        return self.owners == 1 and self.extent.nbytes == whole_pages(nbytes)


class Space:
    """Slots in a file. Calls come one at a time: its owner has a lock.

    Args:
        file: a `deepspeed_ext.io.File`.
        taken: extents in use from the start.
    """

    def __init__(self, file: Any, taken: Iterable[Extent] = ()) -> None:
        self._file = file
        self._extents = Extents(taken)
        self._floor = 0  # what was reserved is not cut off

    @property
    def end(self) -> int:
        """Bytes in the file."""
        return self._extents.end

    @property
    def used(self) -> int:
        """Bytes of the slots."""
        return self._extents.used

    def disk_free(self) -> int:
        """Return what the file system has free; -1: it does not say."""
        return int(self._file.free_bytes())

    def fit(self, nbytes: int) -> Slot | None:
        """Return a new slot in what is free in the file, or None."""
        extent = self._extents.take(nbytes)
        return Slot(extent) if extent else None

    def grow(self, nbytes: int, what: str, *, ahead: bool = False) -> None:
        """Make the file as much longer as it takes until a slot of nbytes fits.

        Args:
            what: opens the text of the error.
            ahead: also until as much is unused as is used, at most 64 MiB, if the disk has that
                to spare: many small reservations take several times as long as a few large ones.

        Raises:
            OSError: ENOSPC, or what the file system says; the file is as long as before.
        """
        self._grow(self._extents.missing(nbytes), what, ahead=ahead)

    def _grow(self, missing: int, what: str, *, ahead: bool) -> None:
        if missing <= 0:
            return
        free = self.disk_free()
        if 0 <= free < missing:
            raise OSError(errno.ENOSPC, self._shortage(what, missing, free, errno.ENOSPC))
        surplus = self._surplus() if ahead else 0
        if surplus and not 0 <= free < missing + 2 * surplus:  # as much is left to others
            with contextlib.suppress(OSError):  # perhaps it has what is missing
                self._lengthen(missing, surplus)
                return
        try:
            self._lengthen(missing)
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(code, self._shortage(what, missing, free, code)) from error

    def reserve(self, nbytes: int, what: str, in_parts: bool = False) -> None:
        """Have nbytes free, and keep the file from getting shorter than it is then.

        Args:
            what: opens the text of the error.
            in_parts: they may be scattered.
        """
        if in_parts:
            self._grow(nbytes - (self.end - self.used), what, ahead=False)
        else:
            self.grow(nbytes, what)
        self._floor = self._extents.end

    def release(self, slot: Slot) -> None:
        """Free the slot if nobody has it any more."""
        if not slot.owners and not slot.users and not slot.is_free:
            slot.is_free = True  # so that nobody frees it again, who was interrupted here
            self._extents.give_back(slot.extent)
            # As much as is in use may stay: what was freed is often needed again at once.
            if self._unused_end() > self._extents.used:
                self.cut_unused()

    def cut_unused(self) -> None:
        """Cut off what is free at the end of the file and was not reserved."""
        self._cut(self._unused_end())

    def trim(self) -> None:
        """Cut off all that is free at the end of the file, also what was reserved."""
        self._cut(self._extents.tail)

    def _unused_end(self) -> int:
        return min(self._extents.tail, self._extents.end - self._floor)

    def _surplus(self) -> int:
        unused = self._extents.end - self._extents.used
        return max(min(self._extents.used, _MOST_AHEAD) - unused, 0)

    def _lengthen(self, missing: int, surplus: int = 0) -> None:
        end = self._extents.end
        grown = missing + surplus
        try:
            self._file.allocate(end, grown)
            if self._file.size() < end + grown:  # a file system that cannot reserve: no surplus,
                grown = missing  # or what is put into that would not be checked for free space
                self._file.truncate(end + grown)
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # a part of it may have been reserved
            raise
        self._extents.grow(grown)

    def _cut(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # then it stays, and stays in the books
            self._file.truncate(self._extents.end - nbytes)
            self._extents.cut(nbytes)

    def _shortage(self, what: str, missing: int, free: int, code: int) -> str:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if code == errno.EFBIG and limit != resource.RLIM_INFINITY:
            return (
                f"TensorStore: {what} needs {missing} bytes more than the {self._extents.end} of"
                f" {self._file.path}, expected at most {limit} in all, the file size limit of this"
                " process (ulimit -f); raise it"
            )
        reason = "" if code == errno.ENOSPC else f" ({os.strerror(code)})"
        has = f"has {free} free" if free >= 0 else "does not say what it has free"
        unused = self._extents.end - self._extents.used
        return (
            f"TensorStore: {what} needs {missing} bytes, {self._file.path} {has}{reason}, and no "
            f"gap among the {unused} unused bytes of the store is large enough; free space there"
        )


def extent_of(offset: int, nbytes: int) -> Extent:
    """Return the extent of a tensor."""
    return Extent(offset, whole_pages(nbytes))
