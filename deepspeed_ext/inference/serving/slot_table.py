"""Which request has which slot of the cache, which pages are promised, and who computes what."""

from typing import NamedTuple

from deepspeed_ext.inference.execution.runner import ROWS
from deepspeed_ext.inference.execution.sampling import Kind, uniform
from deepspeed_ext.inference.requests.request import Request
from deepspeed_ext.inference.requests.state import State


class Batch:
    """Up to 64 requests whose next tokens are sampled together, and what stays the same for them.

    Args:
        requests: all with a slot.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.slots = [request.slot for request in requests]
        self.kind = Kind()
        for request in requests:
            self.kind |= request.options.kind

    def uniforms(self) -> list[float]:
        """Return the number that the next token of each is drawn by; none if none is drawn."""
        return [uniform(each.key, each.queued) for each in self.requests] if self.kind.drawn else []


def batches_of(requests: list[Request]) -> list[Batch]:
    """Return requests in batches that have no more rows than a step may have."""
    return [Batch(requests[i : i + ROWS]) for i in range(0, len(requests), ROWS)]


class ByState(NamedTuple):
    """Requests that have a slot, in the order in which they were admitted.

    Args:
        prefilling: all that are PREFILLING.
        running: all that are RUNNING and want a token more than are queued.
    """

    prefilling: list[Request]
    running: list[Batch]


class SlotTable:
    """Slots, and the pages that are promised to the requests that have one.

    Args:
        slots: of the cache.
        pages: of the cache.
    """

    def __init__(self, slots: int, pages: int) -> None:
        self.pages = pages
        self.promised = 0  # pages that requests with a slot have, or may ask for
        self.free = list(range(slots - 1, -1, -1))  # the next one at the end
        self.requests: dict[int, Request] = {}  # by slot, in the order in which they were admitted
        self._by_state: ByState | None = None

    def has_room_for(self, request: Request) -> bool:
        """Return whether there are a slot and pages for all that a request may become."""
        return bool(self.free) and self.promised + _more_pages(request) <= self.pages

    def admit(self, request: Request) -> None:
        """Give a request a slot, for which there is room."""
        slot, pages = self.free[-1], _more_pages(request)
        self.requests[slot] = request  # first: if this is interrupted, all that are here fail
        request.admit(slot)
        request.prompt.slots.append(slot)
        self.free.pop()
        self.promised += pages
        self._regroup()

    def queue_tokens(self, batch: Batch) -> None:
        """Note that the next token of each of a batch is queued."""
        for request in batch.requests:
            request.queue_token()
            if request.queued in (1, request.max_new_tokens):
                self._regroup()

    def release(self, request: Request) -> None:
        """Take the slot of a request that is done."""
        prompt, slot = request.prompt, request.slot
        prompt.slots.remove(slot)
        self.promised -= request.own_pages
        if not prompt.slots:
            self.promised -= prompt.shared_pages
            prompt.hidden = None
        del self.requests[slot]
        self.free.append(slot)
        self._regroup()

    def by_state(self) -> ByState:
        """Return who is prefilled and who runs; most steps change nothing of that."""
        if self._by_state is None:
            some = self.requests.values()
            running = [each for each in some if each.state is State.RUNNING and each.wants_token]
            prefilling = [each for each in some if each.state is State.PREFILLING]
            self._by_state = ByState(prefilling, batches_of(running))
        return self._by_state

    def _regroup(self) -> None:
        """Let it be found out again who is in which state."""
        self._by_state = None


def _more_pages(request: Request) -> int:
    """Return the pages that a request takes: those of its prompt if no other one has them."""
    prompt = request.prompt
    return request.own_pages + (0 if prompt.slots else prompt.shared_pages)
