"""KVCache: ten thousand random operations against a dict of tensors; every error."""

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.inference import KVCache
from deepspeed_ext.inference.execution.page_table import PageTable

HEADS, WIDTH = 1, 2


def write(cache: KVCache, slot: int, begin: int, values: Tensor) -> None:
    """Append as rope_append_ does: to the places that the table names."""
    for layer in range(2):
        tensors = cache.layer(layer)
        tokens = torch.arange(begin, begin + len(values))
        pages = tensors.table[slot, tokens // 64].long()
        tensors.keys[pages, 0, tokens % 64] = values + layer
        tensors.values[pages, 0, tokens % 64] = -values - layer


def assert_holds(cache: KVCache, slot: int, want: Tensor) -> None:
    assert cache.length(slot) == len(want)
    for layer in range(2):
        tensors = cache.layer(layer)
        assert tensors.lengths[slot] == len(want)
        held = -(-len(want) // 64)
        table = tensors.table[slot]
        assert (table[held:] == -1).all() and (table[:held] >= 0).all()
        keys, values = (t[table[:held].long(), 0] for t in (tensors.keys, tensors.values))
        assert torch.equal(keys.flatten(0, 1)[: len(want)], want + layer)
        assert torch.equal(values.flatten(0, 1)[: len(want)], -want - layer)


class Model:
    """What the cache should hold: a tensor for each slot in use."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = KVCache(6, 300, HEADS, WIDTH, layers=2, dtype=torch.float32, pages=18)
        self.held: dict[int, Tensor] = {}
        self.refused = 0

    def reserve(self) -> None:
        count = self.random.choice([1, 1, 2])
        slots = self.random.sample(range(6), count)
        ns = [self.random.choice([0, 1, 1, 5, 63, 64, 65, 130]) for _ in slots]
        before = {slot: self.held.get(slot, torch.empty(0, WIDTH)) for slot in slots}
        full = any(len(before[s]) + n > 300 for s, n in zip(slots, ns, strict=True))
        free = self.cache.free_pages
        try:
            self.cache.reserve(slots, ns)
        except (ValueError, RuntimeError) as error:
            self.refused += 1
            assert isinstance(error, ValueError) == full
            assert self.cache.free_pages == free
            for slot in set(slots) & set(self.held):
                assert_holds(self.cache, slot, self.held[slot])
            return
        assert not full
        for slot, n in zip(slots, ns, strict=True):
            new = torch.rand(n, WIDTH)
            write(self.cache, slot, len(before[slot]), new)
            self.held[slot] = torch.cat([before[slot], new])

    def fork(self) -> None:
        free = sorted(set(range(6)) - set(self.held))
        if free and self.held:
            source, target = self.random.choice(sorted(self.held)), self.random.choice(free)
            self.cache.fork(source, target)
            self.held[target] = self.held[source]

    def reorder(self) -> None:
        if self.held:
            slots = self.random.sample(range(6), self.random.randrange(4))
            sources = [self.random.choice(sorted(self.held)) for _ in slots]
            self.cache.reorder(slots, sources)
            after = [self.held[source] for source in sources]
            self.held.update(zip(slots, after, strict=True))

    def truncate(self) -> None:
        if self.held:
            slot = self.random.choice(sorted(self.held))
            length = self.random.randint(0, len(self.held[slot]))
            self.cache.truncate(slot, length)
            self.held[slot] = self.held[slot][:length]

    def free(self) -> None:
        if self.held:
            slot = self.random.choice(sorted(self.held))
            self.cache.free(slot)
            del self.held[slot]


@pytest.mark.parametrize("seed", range(2))
def test_random_operations(seed: int) -> None:
    """5,000 each; all slots are looked at after each, and at last no page is lost."""
    torch.manual_seed(seed)
    model = Model(seed)
    kinds = ["reserve"] * 5 + ["fork", "reorder", "truncate", "truncate", "free"]
    for step in range(5000):
        getattr(model, model.random.choice(kinds))()
        for slot in model.held if step % 5 == 0 else ():
            assert_holds(model.cache, slot, model.held[slot])
    assert model.refused > 50
    for slot in list(model.held):
        model.cache.free(slot)
    assert model.cache.free_pages == 18 and not any(model.cache._page_table.holders)
    assert (model.cache.layer(0).table == -1).all()


def small(**options: object) -> KVCache:
    return KVCache(3, 100, HEADS, WIDTH, dtype=torch.float32, **options)  # type: ignore[arg-type]


def test_a_reservation_is_of_all_slots_or_of_none() -> None:
    cache = small(pages=3)
    cache.reserve(0, 64)
    with pytest.raises(
        RuntimeError,
        match=r"slot 2 has length 0 and is in need of 2 pages for 65 more tokens,"
        r" expected at most 1 of 3",
    ):
        cache.reserve([1, 2], [64, 65])
    assert cache.free_pages == 2 and cache.length(1) == 0
    with pytest.raises(ValueError, match="slot 1 is free"):
        cache.free(1)
    cache.reserve([1, 2], 64)


@pytest.mark.parametrize("length", [99, 100])
def test_capacity(length: int) -> None:
    cache = small()
    cache.reserve(0, length)
    text = f"slot 0 has length {length} and is to have {101 - length} more, expected at most its"
    with pytest.raises(ValueError, match=rf"^kv_cache.reserve: {text} capacity, 100$"):
        cache.reserve(0, 101 - length)
    cache.reserve(0, 100 - length)
    assert cache.length(0) == 100


def test_a_fork_that_writes_has_its_own_last_page_and_copies_nothing_else() -> None:
    cache = small()
    cache.reserve(0, 70)
    cache.fork(0, 1)
    first, second = cache._page_table.tables[0]
    assert cache._page_table.tables[1] == [first, second]
    cache.reserve([0, 1], 1)  # one of both copies, the other is alone then
    tables = cache._page_table.tables
    assert tables[0][0] == tables[1][0] == first and tables[0][1] != tables[1][1]
    assert second in (tables[0][1], tables[1][1])
    cache.truncate(0, 64)
    cache.fork(0, 2)
    cache.reserve(2, 1)  # a whole last page is not written to
    assert tables[2][0] == first and cache.free_pages == 6 - 3


def test_quantized_pages_are_copied_with_their_scales() -> None:
    for kind in ("int8", "fp8"):
        cache = small(quantized=kind)
        cache.reserve(0, 10)
        layer = cache.layer(0)
        page = int(layer.table[0, 0])
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            assert tensor is not None
            tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)[page] = 7
        cache.fork(0, 1)
        cache.reserve(1, 1)
        other = int(layer.table[1, 0])
        assert other != page
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            assert tensor is not None
            bits = tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)
            assert (bits[other] == 7).all()


ERRORS = {
    "slot beyond": (lambda c: c.reserve(3, 1), ValueError, "slot is 3, expected 0 to 2"),
    "slot below": (lambda c: c.reserve(-1, 1), ValueError, "slot is -1, expected 0 to 2"),
    "slot of a bool": (lambda c: c.reserve([True], 1), TypeError, "slot is True, expected an int"),
    "slot twice": (lambda c: c.reserve([0, 0], 1), ValueError, "expected no slot twice"),
    "n below": (lambda c: c.reserve(0, -1), ValueError, "n is -1, expected 0 or more"),
    "n of a float": (lambda c: c.reserve([0], [1.0]), TypeError, "n is 1.0, expected an int"),
    "n too many": (lambda c: c.reserve(0, [1, 1]), ValueError, "n has length 2, expected 1"),
    "n huge": (lambda c: c.reserve(0, 2**63), ValueError, "expected at most its capacity, 100"),
    "fork of a free slot": (lambda c: c.fork(1, 2), ValueError, "slot 1 is free, expected one"),
    "fork onto one in use": (lambda c: c.fork(0, 0), ValueError, "slot 0 is in use, expected one"),
    "fork beyond": (lambda c: c.fork(0, 3), ValueError, "slot is 3"),
    "truncate more": (lambda c: c.truncate(0, 6), ValueError, "length is 6, expected 0 to 5, that"),
    "truncate below": (lambda c: c.truncate(0, -1), ValueError, "length is -1"),
    "truncate a free slot": (lambda c: c.truncate(1, 0), ValueError, "slot 1 is free"),
    "free twice": (lambda c: (c.free(0), c.free(0)), ValueError, "slot 0 is free"),
    "reorder from a free slot": (lambda c: c.reorder([1], [2]), ValueError, "slot 2 is free"),
    "reorder twice": (lambda c: c.reorder([1, 1], [0, 0]), ValueError, "expected no slot twice"),
    "reorder too few": (lambda c: c.reorder([1], []), ValueError, "sources has length 0"),
    "length beyond": (lambda c: c.length(7), ValueError, "slot is 7"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, text = ERRORS[name]
    cache = small()
    cache.reserve(0, 5)
    with pytest.raises(kind, match=text):
        call(cache)
    if name != "free twice":
        assert cache.length(0) == 5 and cache.free_pages == 5
        assert cache.layer(0).lengths.tolist() == [5, 0, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(slots=0), "slots is 0"),
        (dict(capacity=-5), "capacity is -5"),
        (dict(pages=0), "pages is 0"),
        (dict(quantized="int4"), "quantized is 'int4'"),
        (dict(dtype=torch.int8), "dtype is torch.int8"),
    ],
)
def test_constructor_refuses(options: dict[str, object], text: str) -> None:
    arguments = dict(slots=1, capacity=1, kv_heads=1, head_dim=1) | options
    with pytest.raises(ValueError, match=rf"^kv_cache: {text}, expected"):
        KVCache(**arguments)  # type: ignore[arg-type]


def test_a_violation_is_told_once() -> None:
    cache = small()
    cache.layer(0).violations.fill_(1)
    with pytest.raises(RuntimeError, match="was to write outside of the pages"):
        cache.check()
    cache.check()


def test_threads_take_different_pages() -> None:
    cache = KVCache(8, 640, HEADS, WIDTH, dtype=torch.float32)
    threads = [
        threading.Thread(target=lambda s=slot: [cache.reserve(s, 1) for _ in range(640)])
        for slot in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tables = [page for table in cache._page_table.tables for page in table]
    assert sorted(tables) == list(range(80)) and cache.layer(0).lengths.tolist() == [640] * 8


CHANGES: dict[str, Callable[[KVCache], None]] = {  # of a cache whose slot 0 has two pages
    "reserve": lambda cache: cache.reserve([0, 1], 64),
    "fork": lambda cache: cache.fork(0, 1),
    "reorder": lambda cache: cache.reorder([1, 0], [0, 0]),
    "truncate": lambda cache: cache.truncate(0, 3),
    "free": lambda cache: cache.free(0),
    "clear": lambda cache: cache.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_changes_the_tables_has_the_lock(name: str) -> None:
    """From the first look at them to the last, so that two threads never take the same page."""

    class Watched(PageTable):
        def __getattribute__(self, attribute: str) -> Any:
            assert cache._lock.locked()
            seen.append(attribute)
            return super().__getattribute__(attribute)

    cache, seen = KVCache(3, 200, HEADS, WIDTH, dtype=torch.float32), list[str]()
    cache.reserve(0, 70)
    cache._page_table.__class__ = Watched
    CHANGES[name](cache)
    assert seen and not cache._lock.locked()


@pytest.mark.parametrize("name", CHANGES)
def test_a_thread_waits_until_another_has_changed_the_tables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up in the middle, it lets no other thread look for free pages."""
    cache = KVCache(3, 200, HEADS, WIDTH, dtype=torch.float32)
    cache.reserve(0, 70)
    events, is_inside, may_go_on = queue.Queue[str](), threading.Event(), threading.Event()
    lock, send, plan = cache._lock, KVCache._send_lengths, PageTable.plan

    class Asked:
        def __enter__(self) -> None:
            if threading.current_thread() is second:
                events.put("asks for the lock")
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def held_up(self: KVCache) -> None:
        if threading.current_thread() is first:
            is_inside.set()
            assert may_go_on.wait(60)
        send(self)

    def noted(self: PageTable, *arguments: Any) -> Any:
        if threading.current_thread() is second:
            events.put("looks for pages")
        return plan(self, *arguments)

    first = threading.Thread(target=CHANGES[name], args=(cache,), daemon=True)
    second = threading.Thread(target=cache.reserve, args=(2, 65), daemon=True)
    monkeypatch.setattr(cache, "_lock", Asked())
    monkeypatch.setattr(KVCache, "_send_lengths", held_up)
    monkeypatch.setattr(PageTable, "plan", noted)
    first.start()
    assert is_inside.wait(60)
    second.start()
    assert events.get(timeout=60) == "asks for the lock" and events.empty()
    may_go_on.set()
    first.join(60)
    second.join(60)
    assert events.get(timeout=60) == "looks for pages" and cache.length(2) == 65
    holders = [sum(page in table for table in cache._page_table.tables) for page in range(12)]
    assert holders == cache._page_table.holders and holders.count(0) == cache.free_pages
    assert cache.layer(0).lengths.tolist() == cache._page_table.lengths


def test_a_step_without_a_new_page_touches_no_table() -> None:
    """Whatever is done for each page of each slot would be done in each step."""
    cache = KVCache(2, 640, 1, 8)
    cache.reserve([0, 1], [130, 5])
    tables = list(cache._page_table.tables)
    cache.reserve([0, 1], 1)
    assert all(a is b for a, b in zip(cache._page_table.tables, tables, strict=True))
    assert (cache.length(0), cache.length(1)) == (131, 6)
    cache.reserve(1, 59)
    assert len(cache._page_table.tables[1]) == 2 and len(tables[1]) == 1


def test_clear_frees_everything() -> None:
    cache = KVCache(3, 640, 1, 8)
    cache.reserve([0, 1], [130, 5])
    cache.fork(0, 2)
    cache._page_table.free.pop()  # as an interruption may leave it
    cache.clear()
    assert cache.free_pages == 30 and sorted(cache._page_table.free) == list(range(30))
    assert [cache.length(i) for i in range(3)] == [0, 0, 0]
    kv = cache.layer(0)
    assert bool((kv.table == -1).all()) and bool((kv.lengths == 0).all())
    cache.reserve([2, 0], 640)
