"""TensorStore against a dictionary: random calls, several threads, reopening."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aio_cases import payload
from hypothesis import HealthCheck, given, settings, strategies as st

from deepspeed_ext import io
from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.io.store.tensor_store import TensorStore

NAMES = st.sampled_from("abcde")
SIZES = st.sampled_from([0, 1, 511, 4095, 4096, 4097, 8192, 9000, 40_000])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "put_async", "get_async"]), NAMES, SIZES),
        st.tuples(st.sampled_from(["get", "delete"]), NAMES, st.just(0)),
        st.tuples(st.sampled_from(["commit", "reopen", "wait", "reserve"]), st.none(), SIZES),
    ),
    max_size=30,
)


class Model:
    """A store and the dictionary that it has to agree with."""

    def __init__(self, path: Path, durable: bool, engine: io.AsyncIO) -> None:
        self.open = lambda: TensorStore(path, durable=durable, engine=engine)
        self.durable = durable
        self.store = self.open()
        self.now: dict[str, torch.Tensor] = {}
        self.committed: dict[str, torch.Tensor] = {}
        self.reads: list[tuple[io.Future, torch.Tensor]] = []

    def step(self, verb: str, name: str, size: int, seed: int) -> None:
        if verb in ("put", "put_async"):
            self.now[name] = payload(size, seed)
            future = self.store.put_async(name, self.now[name])
            if verb == "put":
                future.result()
        elif verb == "commit" and self.durable:
            self.store.commit()
            self.committed = dict(self.now)
        elif verb == "reopen" and self.durable:
            self.store.close()
            self.store, self.now = self.open(), dict(self.committed)
            self.check()
        elif verb == "wait":
            self.store.wait()
        elif verb == "reserve":
            self.store.reserve(size)
        elif name in self.now:
            self.of_a_name(verb, name)
        elif name is not None:
            with pytest.raises(KeyError):
                self.store.delete(name) if verb == "delete" else self.store.get_async(name)

    def of_a_name(self, verb: str, name: str) -> None:
        if verb == "get_async":
            self.reads.append((self.store.get_async(name), self.now[name]))
        elif verb == "get":
            assert torch.equal(self.store.get(name), self.now[name])
        else:
            self.store.delete(name)
            del self.now[name]

    def check(self) -> None:
        for future, tensor in self.reads:
            assert torch.equal(future.result(), tensor), "a read has what was there when it began"
        assert sorted(self.store.names()) == sorted(self.now)
        for name, tensor in self.now.items():
            assert torch.equal(self.store.get(name), tensor)
        self.store.wait()
        stats = self.store.stats()
        assert stats["in_flight"] == 0
        assert stats["file_bytes"] == self.store._file.size()
        now = sum(whole_pages(tensor.numel()) for tensor in self.now.values())
        committed = sum(whole_pages(tensor.numel()) for tensor in self.committed.values())
        assert now <= stats["used_bytes"] <= now + committed
        assert committed <= stats["used_bytes"]


@pytest.fixture(scope="module")
def shared_engine() -> io.AsyncIO:
    return io.AsyncIO(block_size=4096, queue_depth=4)


@pytest.mark.parametrize("durable", [False, True], ids=["scratch", "durable"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_agrees_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    shared_engine: io.AsyncIO,
    durable: bool,
    steps: list[tuple[str, str, int]],
) -> None:
    model = Model(tmp_path_factory.mktemp("store"), durable, shared_engine)
    try:
        for seed, (verb, name, size) in enumerate(steps):
            model.step(verb, name, size, seed)
        model.check()
    finally:
        model.store.close()


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let the threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize("durable", [False, True], ids=["scratch", "durable"])
def test_eight_threads(tmp_path: Path, durable: bool) -> None:
    """Each has names of its own, all have one in common, whose content is always a whole one."""
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        mine = {}
        try:
            start.wait()
            for turn in range(25):
                name = f"{number}-{turn % 4}"
                mine[name] = torch.full((2000 + 700 * (turn % 5),), float(100 * number + turn))
                store.put_async(name, mine[name])
                store.put_async("common", torch.full((6000,), float(number)))
                common = store.get("common")
                assert common.eq(common[0]).all()
                assert torch.equal(store.get(name), mine[name])
                if turn % 6 == 5:
                    store.delete(name)
                    del mine[name]
                if durable and turn % 8 == 7:
                    store.commit()
            left.update(mine)
        except BaseException as failure:
            failures.append(failure)

    left: dict[str, torch.Tensor] = {}
    with TensorStore(tmp_path / "s" if durable else tmp_path, durable=durable) as store:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        store.wait()
        stats = store.stats()
        held = sum(whole_pages(store.info(name).nbytes) for name in store)
        assert stats["in_flight"] == 0
        assert stats["used_bytes"] >= held if durable else stats["used_bytes"] == held
        store.delete("common")
        assert sorted(store) == sorted(left)
        for name, tensor in left.items():
            assert torch.equal(store.get(name), tensor)
        store.wait()
    if durable:
        with TensorStore(tmp_path / "s", durable=True, read_only=True) as store:
            assert sorted(store) == sorted(left)
            for name, tensor in left.items():
                assert torch.equal(store.get(name), tensor)
