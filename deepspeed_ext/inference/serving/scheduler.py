"""Which request has which slot when, and what is computed next: continuous batching.

Requests wait in a line until there are a slot and pages for all that they may become; so none is
stopped on its way for want of memory. A prompt is taken in alone, in parts that are cut from its
beginning, between steps in which all others go on by a token. So whatever shapes a request meets
are its own: only rows of up to 64, which do not depend on each other, are computed in company.
Packs give that up: several prompts are taken in at once, end to end, and with them the next tokens
of all others, so that weights are read once for both.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.runner import ROWS, Answer, Steps
from deepspeed_ext.inference.execution.sampling import Kind, uniform
from deepspeed_ext.inference.requests.request import Request
from deepspeed_ext.ops.attention.paged_kv import PAGE

CHUNK = 1024  # tokens of a prompt that are taken in at once, and of all between two steps
PACKED = 4 * CHUNK  # tokens that the rows of a pack have together in attention, padding included
_LEAST = 256  # tokens that fewer cost as much as, as all weights are read for them


class _Batch:
    """Requests that go on together, and what is the same for each of their steps."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.slots = [request.slot for request in requests]
        self.kind = Kind()
        for request in requests:
            self.kind |= request.options.kind

    def drawn(self) -> list[float]:
        """Return the number that the next token of each is drawn by; none if none is drawn."""
        return [uniform(each.key, each.queued) for each in self.requests] if self.kind.drawn else []


Queued = list[tuple[list[Request], Answer]]


class Scheduler:
    """Lets requests flow through slots. One thread at a time may call it, but for `submit` and
    `cancel`, which anybody may call at any moment.

    Args:
        steps: computes.
        cache: of the steps.
        slots: of the cache.
        pages: of the cache.
        ahead: whether a step is queued before the one before it is read, as a device wants that
            goes on meanwhile. A request that ends is then found out to have one step too late,
            which is computed in vain.
        packs: whether prompts are taken in together.
    """

    def __init__(
        self,
        steps: Steps,
        cache: KVCache,
        slots: int,
        pages: int,
        ahead: bool,
        packs: bool = False,
    ) -> None:
        self._steps, self._cache, self._ahead, self._packs = steps, cache, ahead, packs
        self._slots, self._pages = slots, pages
        self._pad_to = PAGE if steps.pads else 1
        self._incoming: deque[Request] = deque()  # anybody may add to it
        self._unwanted: deque[Request] = deque()  # likewise
        self._waiting: deque[Request] = deque()
        self._is_whole = True  # but for a step that was interrupted
        self._begin()

    def _begin(self) -> None:
        self._free = list(range(self._slots - 1, -1, -1))  # the next one at the end
        self._active: dict[int, Request] = {}  # by slot
        self._beginning: deque[Request] = deque()  # their prompts are not taken in
        self._batches: list[_Batch] | None = None  # to be found out again
        self._promised = 0  # pages that active requests have, or may ask for
        self._unread: deque[Queued] = deque()

    def check(self, request: Request, capacity: int) -> None:
        """Raise unless it fits when it is alone.

        Raises:
            ValueError: it does not.
        """
        prompt, new = request.prompt, request.options.max_new_tokens
        if len(prompt.tokens) + new > capacity:
            raise ValueError(
                f"generate: prompt {prompt.number} has {len(prompt.tokens)} tokens and"
                f" max_new_tokens is {new}, expected at most {capacity} together, the max_tokens"
                " of the engine"
            )
        pages = prompt.shared_pages + request.own_pages
        if pages > self._pages:
            raise ValueError(
                f"generate: prompt {prompt.number} has {len(prompt.tokens)} tokens and"
                f" max_new_tokens is {new}, which is {pages} pages of {PAGE}, expected at most"
                f" {self._pages}, the pages of the engine"
            )

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests take part from the next step on, in their order."""
        self._incoming.extend(request for request in requests if not request.is_done)

    def cancel(self, request: Request) -> None:
        """Let a request end as it is, as soon as there is time for it: at `sweep`."""
        self._unwanted.append(request)

    @property
    def free_slots(self) -> int:
        """How many slots no request has."""
        return len(self._free)

    def step(self) -> None:
        """Let all requests go on by a token, and some prompts by a part.

        Whatever is raised, `sweep` gives those requests an error that had a slot; the next step
        begins with that, and is one of others.
        """
        self.sweep()
        self._is_whole = False
        self._admit()
        assert self._active or not self._waiting  # or nothing would ever happen
        if self._packs and self._beginning:
            queued = self._take_in_pack()
        else:
            queued = self._decode()
            self._take_in_each()
        queued += self._first()
        if queued:
            self._unread.append(queued)
        while len(self._unread) > (1 if self._ahead and queued else 0):
            for requests, answer in self._unread[0]:
                for request, row in zip(requests, answer.read(), strict=False):
                    self._accept(request, row)
            self._unread.popleft()
        self._is_whole = True

    def sweep(self) -> None:
        """Take slots back from requests that were cancelled, or were in a step that failed."""
        was_whole, self._is_whole = self._is_whole, False
        while self._incoming:
            self._waiting.append(self._incoming[0])
            self._incoming.popleft()
        if not was_whole:
            self._give_up()
        is_one_waiting = False
        while self._unwanted:
            request = self._unwanted[0]  # it stays there, should an interruption come
            if not request.is_done:
                self._end(request)
                if self._active.get(request.slot) is request:
                    self._release(request)
                else:
                    is_one_waiting = True
            self._unwanted.popleft()
        if is_one_waiting:
            self._waiting = deque(each for each in self._waiting if not each.is_done)
        self._is_whole = True

    def close(self) -> None:
        """Let everything that is not done fail, and go of what computes."""
        while self._unwanted:
            self._end(self._unwanted.popleft())
        for request in [*self._incoming, *self._waiting, *self._active.values()]:
            request.fail(
                f"generate: prompt {request.prompt.number} was given up, as the engine was closed"
            )
            request.prompt.hidden = None
        self._unread.clear()
        for name in ("_steps", "_cache"):
            vars(self).pop(name, None)  # an interruption may have come in between once before

    @staticmethod
    def _end(request: Request) -> None:
        """End a request as it is."""
        try:
            request.cancel()
        except Exception as error:  # of the tokenizer
            request.fail(error)

    def _give_up(self) -> None:
        """Begin anew after a step that did not end; nothing is known of what it left behind."""
        for request in self._active.values():
            request.fail(
                f"generate: prompt {request.prompt.number} was given up, as a step that it was part"
                " of was interrupted, or failed for the caller that took it"
            )
            request.prompt.slots.clear()
            request.prompt.hidden = None
        here = dict.fromkeys(self._waiting)  # one may be there twice
        for call in {request.call for request in [*self._active.values(), *here]}:
            call.recount()
        self._waiting = deque(each for each in here if not each.is_done)
        self._cache.clear()
        self._begin()

    def _admit(self) -> None:
        """Give slots to those that wait, in their order, as long as there is room for the first."""
        while self._waiting and self._free:
            request = self._waiting[0]
            prompt = request.prompt
            is_shared = bool(prompt.slots)
            if is_shared and prompt.hidden is None:
                return  # it is being taken in
            pages = request.own_pages + (0 if is_shared else prompt.shared_pages)
            if self._promised + pages > self._pages:
                return
            request.slot = self._free[-1]
            self._active[request.slot] = request
            self._free.pop()
            self._waiting.popleft()
            self._promised += pages
            self._steps.start(request.slot, prompt.tokens, request.options)
            if is_shared:
                self._cache.fork(prompt.slots[0], request.slot)
                self._cache.truncate(request.slot, len(prompt.tokens))
                request.taken_in = len(prompt.tokens)
            prompt.slots.append(request.slot)
            self._beginning.append(request)

    def _take_in_each(self) -> None:
        """Take in some prompts, or a part of one, each by itself."""
        cost = 0
        for request in self._beginning:
            if request.left > 0:
                cost += max(_LEAST, min(request.left, CHUNK))
                if cost > CHUNK:
                    return
                self._take_in([request], [min(request.left, CHUNK)])

    def _take_in_pack(self) -> Queued:
        """Let all go on, and take in parts of prompts together with that."""
        batches = self._going()
        batch = batches[0] if len(batches) == 1 else None
        requests, counts = self._pack(CHUNK - (0 if batch is None else len(batch.slots)))
        if batch is None or not requests:
            queued = self._decode()
            if requests:
                self._take_in(requests, counts)
            return queued
        hidden = self._take_in(requests, counts, batch.slots)
        return [self._chosen(batch, hidden)]

    def _pack(self, most: int) -> tuple[list[Request], list[int]]:
        """Return prompts in the order in which they came, and how many tokens to take of each."""
        requests, counts = list[Request](), list[int]()
        left, longest = most, 0
        for request in self._beginning:
            count = min(request.left, left)
            longest = max(longest, count)
            if left == 0 or len(requests) == ROWS or longest * (len(requests) + 1) > PACKED:
                break
            if count > 0:
                requests.append(request)
                counts.append(count)
                left -= count
        return requests, counts

    def _take_in(
        self, requests: list[Request], counts: list[int], going: Sequence[int] = ()
    ) -> Tensor:
        """Take in so many more tokens of prompts; return the hidden states of what goes on."""
        slots, parts = [request.slot for request in requests], []
        for request, count in zip(requests, counts, strict=True):
            parts.append(request.prompt.tokens[request.taken_in : request.taken_in + count])
        self._cache.reserve([*going, *slots], [1] * len(going) + counts)
        if len(parts) == 1 and not going:
            hidden = self._steps.take_in(slots[0], parts[0], self._pad_to)
        else:
            hidden = self._steps.take_in_pack(list(going), slots, parts, self._pad_to)
        for i, (request, count) in enumerate(zip(requests, counts, strict=True), len(going)):
            request.taken_in += count
            if request.left == 0:
                request.prompt.hidden = hidden[i : i + 1]
        return hidden[: len(going)]

    def _first(self) -> Queued:
        """Choose the first token after each prompt that is there as a whole."""
        some = [request for request in self._beginning if request.left == 0]
        answers = []
        for i in range(0, len(some), ROWS):
            batch = _Batch(some[i : i + ROWS])
            hidden = torch.cat([each.prompt.last_hidden for each in batch.requests])
            answers.append(self._chosen(batch, hidden))
        if some:
            self._beginning = deque(each for each in self._beginning if each.left > 0)
            self._batches = None
        return answers

    def _chosen(self, batch: _Batch, hidden: Tensor) -> tuple[list[Request], Answer]:
        """Choose the next token of each of a batch."""
        answer = self._steps.choose(batch.slots, hidden, batch.drawn(), batch.kind)
        return self._queued(batch, answer)

    def _going(self) -> list[_Batch]:
        """Return all whose next token is not queued yet, and is not one too many."""
        if self._batches is None:
            some = [
                request
                for request in self._active.values()
                if 0 < request.queued < request.options.max_new_tokens
            ]
            self._batches = [_Batch(some[i : i + ROWS]) for i in range(0, len(some), ROWS)]
        return self._batches

    def _decode(self) -> Queued:
        """Let all go on by a token."""
        answers = []
        for batch in self._going():
            self._cache.reserve(batch.slots, 1)
            answer = self._steps.decode(batch.slots, batch.drawn(), batch.kind)
            answers.append(self._queued(batch, answer))
        return answers

    def _queued(self, batch: _Batch, answer: Answer) -> tuple[list[Request], Answer]:
        """Note that the next token of each of a batch is queued."""
        for request in batch.requests:
            request.queued += 1
            if request.queued == request.options.max_new_tokens:
                self._batches = None
        return batch.requests, answer

    def _accept(self, request: Request, row: list[float]) -> None:
        if request.is_done:  # it is the step that was one too many
            return
        try:
            request.accept(row)
        except Exception as error:  # of the tokenizer
            request.fail(error)
        if request.is_done:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Take a slot back. What is queued for it comes before whatever it is used for next."""
        prompt, slot = request.prompt, request.slot
        prompt.slots.remove(slot)
        self._promised -= request.own_pages
        if not prompt.slots:
            self._promised -= prompt.shared_pages
            prompt.hidden = None
        if self._cache.length(slot) > 0:
            self._cache.free(slot)
        if request in self._beginning:
            self._beginning.remove(request)
        del self._active[slot]
        self._free.append(slot)
        self._batches = None
