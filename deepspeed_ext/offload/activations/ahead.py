"""What comes back before backward wants it: in the reverse of the order in which it was saved."""

import weakref

from deepspeed_ext.offload.activations.kept import Back, Kept

_WINDOW = 2  # times the bytes of the largest one come ahead, at least


class Order:
    """All that has been saved and is there, in its order, and how far it has come back.

    Nothing is wrong if backward takes another order: what it wants comes when it wants it.
    """

    def __init__(self) -> None:
        self._all: list[weakref.ref[Kept]] = []
        self._ahead: list[weakref.ref[Back]] = []
        self._next = -1  # of which is to come next
        self._largest = 0
        self._room = 0  # bytes that have become free on the device since forward
        self._most = 64  # entries before dead ones are looked for
        self.counts = {"ahead": 0, "on_demand": 0}

    def add(self, kept: Kept) -> None:
        """Take note of what has been saved now."""
        while self._all and self._all[-1]() is None:
            self._all.pop()
        if len(self._all) >= self._most:
            self._drop_dead()
        kept.position = len(self._all)
        self._all.append(weakref.ref(kept))
        if kept.is_away:
            self._largest = max(self._largest, kept.nbytes)
        self._next, self._room = kept.position, 0

    def back(self, kept: Kept) -> Back:
        """Return what somebody wants now."""
        back = kept.back()
        if back is None or not back.is_usable():
            back = kept.bring_back()
            if back.new_bytes:
                self.counts["on_demand"] += 1
                self._next = kept.position - 1
        self._next = min(self._next, kept.position - 1)
        return back

    def add_room(self, nbytes: int) -> None:
        """Take note of bytes on the device that backward is done with."""
        self._room += nbytes

    def hasten(self) -> None:
        """Begin to bring back what is wanted next, as far as there is room for it."""
        self._ahead = [ref for ref in self._ahead if ref() is not None]
        under_way = sum(back.new_bytes for ref in self._ahead if (back := ref()) is not None)
        while self._next >= 0:
            kept = self._all[self._next]()
            if kept is not None and kept.is_away and kept.back() is None:
                if under_way and under_way + kept.nbytes > _WINDOW * self._largest + self._room:
                    return
                back = kept.bring_back()
                self.counts["ahead"] += back.new_bytes > 0
                under_way += back.new_bytes
                self._ahead.append(weakref.ref(back))
            self._next -= 1

    def _drop_dead(self) -> None:
        alive = [kept for ref in self._all if (kept := ref()) is not None]
        for position, kept in enumerate(alive):
            kept.position = position
        self._all = [weakref.ref(kept) for kept in alive]
        self._most = 2 * len(alive) + 64
