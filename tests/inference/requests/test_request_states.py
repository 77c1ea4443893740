"""The states of a request: what may follow what, what raises, and who is where after each step."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import tiny

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.request import Call, Prompt, Request
from deepspeed_ext.inference.requests.state import NEXT, State
from deepspeed_ext.inference.serving.slot_table import ByState, SlotTable
from deepspeed_ext.inference.serving.step_plan import CHUNK, plan_step

WAITING, PREFILLING, RUNNING, DONE = State
ROW = [5.0, 1.0, 0.0, 1.0]  # token 5, as `sample` says it
EVENTS: dict[str, Callable[[Request], None]] = {
    "admit": lambda request: request.admit(3),
    "prefill": lambda request: request.prefill(1),
    "queue_token": lambda request: request.queue_token(),
    "accept": lambda request: request.accept(ROW),
    "cancel": lambda request: request.cancel(),
    "fail": lambda request: request.fail("no more"),
}
LEGAL = {
    (WAITING, "admit"): PREFILLING,
    (PREFILLING, "prefill"): PREFILLING,
    (PREFILLING, "queue_token"): RUNNING,
    (RUNNING, "queue_token"): RUNNING,
    (RUNNING, "accept"): RUNNING,
    **{(state, end): DONE for state in State for end in ("cancel", "fail")},
}


def request_in(state: State, *, news: bool = False, left: int = 0, **options: Any) -> Request:
    """Return a request that has come to a state, with so many tokens of its prompt left before."""
    told = deque[tuple[int, str]]() if news else None
    wanted = SamplingOptions(**options)
    request = Request(Prompt(0, [1, 2, 3]), wanted, 0, 0, 0, frozenset({9}), None, told)
    Call().add(request)
    if state in (PREFILLING, RUNNING):
        request.admit(0)
        request.prefill(3 - left)
    if state is RUNNING:
        request.queue_token()
    if state is DONE:
        request.cancel()
    return request


@pytest.mark.parametrize(("before", "event"), [*itertools.product(State, EVENTS)])
def test_each_event_in_each_state(before: State, event: str) -> None:
    """It leads to the next state, or raises and changes nothing."""
    request = request_in(before)
    assert request.state is before
    if (before, event) in LEGAL:
        EVENTS[event](request)
        assert request.state is LEGAL[before, event]
        assert request.is_done == (request.state is DONE) == (request.call.open == 0)
        return
    kept = repr((request, request.call.open))
    with pytest.raises(RuntimeError, match=f"^request: state is {before.name}, expected [A-Z]+"):
        EVENTS[event](request)
    assert repr((request, request.call.open)) == kept


@pytest.mark.parametrize(("before", "after"), [*itertools.product(State, State)])
def test_each_pair_of_states(before: State, after: State) -> None:
    """Events change a state along the table, and along all of it."""
    ways = {(one, other) for (one, _), other in LEGAL.items() if one is not other}
    assert ((before, after) in ways) == (after in NEXT[before])
    request = request_in(before)
    if after not in NEXT[before]:
        with pytest.raises(RuntimeError, match=rf"^request: state .* to become {after.name}$"):
            request._become(after)


def test_a_prompt_has_to_be_whole_before_a_token_is_queued() -> None:
    request = request_in(PREFILLING, left=1)
    with pytest.raises(RuntimeError, match=r"^request: state is PREFILLING, expected RUNNING$"):
        request.queue_token()
    assert request.queued == 0
    request.prefill(1)
    request.queue_token()
    assert (request.state, request.queued) == (RUNNING, 1)


@pytest.mark.parametrize("end", ["cancel", "fail", "length", "stop", "nan"])
def test_the_first_end_stays(end: str) -> None:
    request = request_in(RUNNING, max_new_tokens=1)
    rows = {"length": ROW, "stop": [9.0, *ROW[1:]], "nan": [5.0, float("nan"), *ROW[2:]]}
    EVENTS[end](request) if end in EVENTS else request.accept(rows[end])
    found = request.state, request.finish_reason, request.error
    failed = end in ("fail", "nan")
    assert found[:2] == (DONE, None if failed else {"cancel": "cancelled"}.get(end, end))
    assert (request.error is not None) == (request.call.error is not None) == failed
    for again in (request.cancel, lambda: request.fail("later")):
        again()
        assert (request.state, request.finish_reason, request.error) == found
    assert request.call.open == 0


def test_a_request_for_no_tokens_is_done_at_once() -> None:
    request = request_in(DONE, max_new_tokens=0)
    assert (request.finish_reason, request.call.open, request.call.requests) == (
        "length",
        0,
        [request],
    )


def test_all_is_told_before_none_is_open() -> None:
    """As another thread ends when it finds none open, and may look between any two lines."""

    class Watched(deque[Request]):
        def append(self, one: Request) -> None:
            assert one.call.open == 1
            super().append(one)

        def extend(self, some: Any) -> None:
            for one in some:
                self.append(one)

    for end in ("cancel", "fail"):
        request = request_in(RUNNING, news=True)
        request.call.ready = Watched()
        EVENTS[end](request)
        assert list(request.call.ready) == [request] and request.call.open == 0
        request.call.open = 1  # as an interruption may leave it
        request.call.recount()
        assert request.call.open == 0


def test_a_plan_says_all_of_a_step_before_any_of_it() -> None:
    """Whose prompt becomes whole samples its first token, and is decoded in no earlier step."""
    running, forked, short = request_in(RUNNING), request_in(PREFILLING), request_in(PREFILLING)
    long = request_in(PREFILLING, left=3)
    long.prompt.tokens = [1] * (2 * CHUNK)
    short.prefilled = 0
    table = SlotTable(4, 8)
    table.requests = dict(enumerate((running, forked, short, long)))
    for packs in (False, True):
        plan = plan_step(table.by_state(), packs)
        (only,) = plan.prefill
        assert [part.request for part in only.parts] == ([short, long] if packs else [short])
        assert sum(part.tokens for part in only.parts) == (CHUNK - 1 if packs else 3)
        batches = [only.running] if packs else plan.decode
        assert [batch.requests for batch in batches if batch is not None] == [[running]]
        assert [batch.requests for batch in plan.first] == [[forked, short]]
    assert plan_step(ByState([], []), packs=True) == ([], [], [])


def test_who_has_left_a_slot_is_in_no_group() -> None:
    table, request = SlotTable(1, 8), request_in(WAITING)
    table.admit(request)
    assert table.by_state() == ([request], [])
    request.cancel()
    table.release(request)
    assert table.by_state() == ([], []) and (table.free, table.promised) == ([0], 0)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_states_say_where_a_request_is(
    ahead: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step: who waits has no slot, who has one is prefilled or runs, others are done."""
    engine = tiny.engine(max_batch=3, max_tokens=4096, pages=72, pack_prefill=packs)
    scheduler = engine._scheduler
    scheduler._ahead = ahead
    seen, real = set[State](), scheduler._read
    requests: list[Request] = []

    def read(*arguments: Any) -> None:
        real(*arguments)
        waiting, active = list(scheduler._waiting), list(scheduler._table.requests.values())
        for request in requests:
            assert (request.state is WAITING) == (request in waiting)
            assert (request.state in (PREFILLING, RUNNING)) == (request in active)
            assert (request.state is RUNNING) <= (request.left == 0 < request.queued)
            seen.add(request.state)
        prefilling, batches = scheduler._table.by_state()
        assert prefilling == [each for each in active if each.state is PREFILLING]
        running = [each for batch in batches for each in batch.requests]
        assert running == [each for each in active if each.state is RUNNING and each.wants_token]

    monkeypatch.setattr(scheduler, "_read", read)
    prompts = [[1] * 3000, [2, 3], [4] * 70, [5], [6] * 900, [7, 8]]
    stream = engine.generate(prompts, max_new_tokens=6, n=2, temperature=1.0, seed=1, stream=True)
    requests += stream._call.requests
    for i, _ in enumerate(stream):
        if i == 3:
            stream.cancel(0)
            stream.cancel(11)
    assert seen == set(State)
    assert [each.finish_reason for each in stream.completions()].count("cancelled") == 2
    tiny.check_all_is_free(engine)


def test_a_request_that_was_cancelled_before_a_step_saw_it() -> None:
    """As another thread ends it after it has looked for new ones, and before it looks again."""
    engine = tiny.engine(max_batch=2)
    request = request_in(WAITING)
    engine._scheduler.submit([request])
    request.cancel()
    engine._scheduler.step()
    assert not engine._scheduler._waiting and not engine._scheduler._table.requests
    tiny.check_all_is_free(engine)
