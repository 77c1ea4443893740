"""Scheduler: which request has a slot when, and what step_plan.py may plan: continuous batching.

Requests wait in a line until there are a slot and pages for all that they may become; so none is
stopped on its way for want of memory. A prompt is prefilled alone, in parts that are cut from its
beginning, between steps in which all running requests are decoded. So whatever shapes a request
meets are its own, and it is batch-invariant: only rows of up to 64, which do not depend on each
other, are computed together. Packed prefill gives that up: several prompts are prefilled at once,
end to end, and with them running requests are decoded, so that weights are read once for both.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.runner import Answer, ModelRunner, PromptPart
from deepspeed_ext.inference.requests.request import Request
from deepspeed_ext.inference.serving.slot_table import Batch, SlotTable
from deepspeed_ext.inference.serving.step_plan import PrefillPass, StepPlan, plan_step
from deepspeed_ext.ops.attention.paged_kv import PAGE


class Pending(NamedTuple):
    """What is queued, and who waits for it.

    Args:
        requests: each gets a row of the answer as its next token; or one of them, a part.
        answer: is on its way.
        part: the tokens of the prompt that all rows are about: from where to where; or None.
    """

    requests: list[Request]
    answer: Answer
    part: tuple[int, int] | None = None


Queued = list[Pending]


class Scheduler:
    """Lets requests flow through slots. One thread at a time may call it, but for `submit` and
    `cancel`, which anybody may call at any moment.

    Args:
        runner: computes.
        cache: of the runner.
        slots: of the cache.
        pages: of the cache.
        ahead: whether a step is queued before the one before it is read, as a device wants that
            goes on meanwhile. A request that ends is then found out to have one step too late,
            which is computed in vain.
        packs: whether prompts are prefilled together.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        slots: int,
        pages: int,
        ahead: bool,
        packs: bool = False,
    ) -> None:
        self._runner, self._cache, self._ahead, self._packs = runner, cache, ahead, packs
        self._slots, self._pages = slots, pages
        self._pad_to = PAGE if runner.pads else 1
        self._incoming: deque[Request] = deque()  # anybody may add to it
        self._unwanted: deque[Request] = deque()  # likewise
        self._waiting: deque[Request] = deque()
        self._is_whole = True  # but for a step that was interrupted
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._table = SlotTable(self._slots, self._pages)
        self._unread: deque[Queued] = deque()

    def room_behind(self, prompt: int, max_tokens: int) -> int:
        """Return how many new tokens have room behind a prompt of so many, when it is alone."""
        return min(max_tokens, self._pages * PAGE + 1) - prompt  # the last one is not kept

    def check_capacity(self, request: Request, max_tokens: int) -> None:
        """Raise unless a request fits when it is alone.

        Raises:
            ValueError: it does not.
        """
        prompt, new = request.prompt, request.max_new_tokens
        has = f"{prompt.called} has {len(prompt.tokens)} tokens"
        together = ""
        if prompt.op == "generate":  # the only one in which there may be more
            has, together = f"{has} and max_new_tokens is {new}", " together"
        if len(prompt.tokens) + new > max_tokens:
            raise ValueError(
                f"{has}, expected at most {max_tokens}{together}, the max_tokens of the engine"
            )
        pages = prompt.shared_pages + request.own_pages
        if pages > self._pages:
            raise ValueError(
                f"{has}, which is {pages} pages of {PAGE}, expected at most {self._pages}, the"
                " pages of the engine"
            )

    @property
    def load(self) -> tuple[int, int]:
        """How many requests have a slot, and how many have none yet; anybody may ask."""
        return len(self._table.requests), len(self._waiting) + len(self._incoming)

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests take part from the next step on, in their order."""
        self._incoming.extend(request for request in requests if not request.is_done)
        if self._is_closed:  # meanwhile: no step will come
            self._refuse_incoming()

    def cancel(self, request: Request) -> None:
        """Let a request end as it is, as soon as there is time for it: at `sweep`."""
        self._unwanted.append(request)

    def step(self) -> None:
        """Decode a token of all running requests, and prefill a part of some prompts.

        Whatever is raised, those requests get an error that had a slot, as soon as there is time
        for it: at `sweep`, or the next step, which is one of others.
        """
        with self._begun_anew_if_interrupted():
            self._end_unwanted()
            self._admit()
            assert self._table.requests or not self._waiting  # or nothing would ever happen
            shares = self._runner.shares_passes
            plan = plan_step(self._table.by_state(), self._packs, shares)
            self._read(self._queue(plan))

    def sweep(self) -> None:
        """Take slots back from requests that were cancelled, or were in a step that failed."""
        with self._begun_anew_if_interrupted():
            self._end_unwanted()

    def close(self) -> None:
        """Let everything that is not done fail, and go of what computes."""
        self._is_closed = True
        while self._unwanted:
            self._end(self._unwanted.popleft())
        self._refuse_incoming()
        for request in [*self._waiting, *self._table.requests.values()]:
            self._refuse(request)
            request.prompt.hidden = None
        self._unread.clear()
        for name in ("_runner", "_cache"):
            vars(self).pop(name, None)  # an interruption may have come in between once before

    def _refuse_incoming(self) -> None:
        while self._incoming:
            try:
                self._refuse(self._incoming.popleft())
            except IndexError:  # another thread was faster
                return

    @staticmethod
    def _refuse(request: Request) -> None:
        request.fail(f"{request.prompt.called} was given up, as the engine was closed")

    @staticmethod
    def _end(request: Request) -> None:
        """End a request as it is."""
        try:
            request.cancel()
        except Exception as error:  # of the tokenizer
            request.fail(error)

    @contextmanager
    def _begun_anew_if_interrupted(self) -> Iterator[None]:
        """Around all that changes requests: what did not come to its end is given up here."""
        was_whole, self._is_whole = self._is_whole, False
        self._let_in()
        if not was_whole:
            self._give_up()
        yield
        self._is_whole = True

    def _let_in(self) -> None:
        """Let those wait for a slot that have come since."""
        while self._incoming:
            if not self._incoming[0].is_done:  # cancelled before it was seen here
                self._waiting.append(self._incoming[0])
            self._incoming.popleft()

    def _give_up(self) -> None:
        """Begin anew after a step that did not end; nothing is known of what it left behind."""
        active = list(self._table.requests.values())
        for request in active:
            request.fail(
                f"{request.prompt.called} was given up, as a step that it was part of was"
                " interrupted, or failed for the caller that took it"
            )
            request.prompt.slots.clear()
            request.prompt.hidden = None
        here = dict.fromkeys(self._waiting)  # one may be there twice
        for call in {request.call for request in [*active, *here]}:
            call.recount()
        self._waiting = deque(each for each in here if not each.is_done)
        self._cache.clear()
        self._begin()

    def _end_unwanted(self) -> None:
        """End what was cancelled as it is."""
        is_one_waiting = False
        while self._unwanted:
            request = self._unwanted[0]  # it stays there, should an interruption come
            if not request.is_done:
                self._end(request)
                if self._table.requests.get(request.slot) is request:
                    self._release(request)
                else:
                    is_one_waiting = True
            self._unwanted.popleft()
        if is_one_waiting:
            self._let_in()  # it may have come, and been cancelled, since the step began
            self._waiting = deque(each for each in self._waiting if not each.is_done)

    def _admit(self) -> None:
        """Give slots to those that wait, in their order, as long as there is room for the first."""
        while self._waiting and self._table.has_room_for(self._waiting[0]):
            request = self._waiting[0]
            prompt = request.prompt
            source = prompt.slots[0] if prompt.slots else None
            if source is not None and prompt.hidden is None:
                return  # it is being prefilled
            self._table.admit(request)
            self._waiting.popleft()
            self._runner.start(request.slot, prompt.tokens, request.options)
            if source is not None:
                self._cache.fork(source, request.slot)
                self._cache.truncate(request.slot, len(prompt.tokens))
                request.prefill(len(prompt.tokens))

    def _queue(self, plan: StepPlan) -> Queued:
        """Queue all of a step; return what is to be read of it."""
        if self._runner.shares_passes and not self._packs:
            queued = self._pass_over(plan)
        else:
            queued = [self._decode(batch) for batch in plan.decode]
            for each in plan.prefill:
                queued += self._prefill(each)
        for batch in plan.first:
            hidden = torch.cat([request.prompt.last_hidden for request in batch.requests])
            queued.append(self._sample(batch, hidden))
        return queued

    def _decode(self, batch: Batch) -> Pending:
        """Compute the next token of each of a batch."""
        self._cache.reserve(batch.slots, 1)
        answer = self._runner.decode(batch.slots, batch.uniforms(), batch.kind)
        self._table.queue_tokens(batch)
        return Pending(batch.requests, answer)

    def _pass_over(self, plan: StepPlan) -> Queued:
        """Decode and prefill in one pass over all layers; nothing is packed."""
        parts = [part for one in plan.prefill for part in one.parts]
        running = [slot for batch in plan.decode for slot in batch.slots]
        given = [_part_of(request, count) for request, count in parts]
        slots = [*running, *(part.slot for part in given)]
        if not slots:
            return []
        self._cache.reserve(slots, [1] * len(running) + [count for _, count in parts])
        answers, prefilled = self._runner.pass_over(
            [(batch.slots, batch.uniforms(), batch.kind) for batch in plan.decode],
            given,
            self._pad_to,
        )
        queued = Queued()
        for batch, answer in zip(plan.decode, answers, strict=True):
            self._table.queue_tokens(batch)
            queued.append(Pending(batch.requests, answer))
        for (request, count), (last, (hidden,)) in zip(parts, prefilled, strict=True):
            queued += self._prefilled(request, count, last, hidden)
        return queued

    def _prefilled(
        self, request: Request, count: int, last: Tensor, hidden: Tensor | None
    ) -> Queued:
        """Note that a part of a prompt is prefilled; return what is to be read of it."""
        told = []
        if request.tells_of_prompt:
            assert hidden is not None
            told = [self._tell_of_prompt(request, hidden)]
        request.prefill(count)
        if request.left == 0:
            request.prompt.hidden = last
        return told

    def _prefill(self, one: PrefillPass) -> Queued:
        """Prefill parts of prompts; with them, compute the next token of each of a batch."""
        slots = [request.slot for request, _ in one.parts]
        counts = [count for _, count in one.parts]
        running = [] if one.running is None else one.running.slots
        self._cache.reserve([*running, *slots], [1] * len(running) + counts)
        if len(slots) == 1 and not running:
            last, of_parts = self._runner.prefill(_part_of(*one.parts[0]), self._pad_to)
        else:
            tokens = [request.next_tokens(count) for request, count in one.parts]
            last, of_parts = self._runner.prefill_packed(running, slots, tokens, self._pad_to)
        queued = [] if one.running is None else [self._sample(one.running, last[: len(running)])]
        for i, (request, count) in enumerate(one.parts):
            own = last[len(running) + i : len(running) + i + 1]
            queued += self._prefilled(request, count, own, of_parts[i])
        return queued

    def _tell_of_prompt(self, request: Request, hidden: Tensor) -> Pending:
        """Compute what is wanted of the next tokens of a prompt, whose hidden states these are."""
        prompt, begin = request.prompt, request.prefilled
        end = begin + len(hidden)
        if prompt.logits is not None:
            answer = self._runner.write_logits(hidden, prompt.logits[begin:end])
        else:
            count, after = request.options.prompt_logprobs, prompt.tokens[begin + 1 : end + 1]
            answer = self._runner.score(hidden[: len(after)], after, count or 0)
        return Pending([request], answer, (begin, end))

    def _sample(self, batch: Batch, hidden: Tensor) -> Pending:
        """Sample the next token of each of a batch."""
        answer = self._runner.sample(batch.slots, hidden, batch.uniforms(), batch.kind)
        self._table.queue_tokens(batch)
        return Pending(batch.requests, answer)

    def _read(self, queued: Queued) -> None:
        """Wait for what is queued, but for the last step where the device is to go on meanwhile."""
        if queued:
            self._unread.append(queued)
        while len(self._unread) > (1 if self._ahead and queued else 0):
            for requests, answer, part in self._unread[0]:
                rows = answer.read()
                if part is not None:
                    self._accept(requests[0], partial(requests[0].accept_part, *part, rows))
                    continue
                for request, row in zip(requests, rows, strict=False):
                    self._accept(request, partial(request.accept, row))
            self._unread.popleft()

    def _accept(self, request: Request, take: Callable[[], None]) -> None:
        if request.is_done:  # it is the step that was one too many
            return
        try:
            take()
        except Exception as error:  # of the tokenizer
            request.fail(error)
        if request.is_done:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Take a slot back. What is queued for it comes before whatever it is used for next."""
        self._table.release(request)
        if self._cache.length(request.slot) > 0:
            self._cache.free(request.slot)


def _part_of(request: Request, count: int) -> PromptPart:
    """Return the next tokens of a prompt for the runner."""
    return PromptPart(request.slot, request.next_tokens(count), request.tells_of_prompt)
