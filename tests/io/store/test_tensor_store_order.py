"""TensorStore with requests in flight: what waits for what, and what a failed put leaves behind."""

import errno
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from store_engines import FailingIO, LazyIO

from deepspeed_ext.io.store import tensor_store
from deepspeed_ext.io.store.job import StoreJob
from deepspeed_ext.io.store.tensor_store import TensorStore

SIZE = 5000  # elements; 5 pages


def content(number: float, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), float(number))


@pytest.fixture(params=["scratch", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "durable")


@pytest.fixture
def lazy() -> Iterator[LazyIO]:
    with LazyIO() as engine:
        yield engine


@pytest.fixture
def failing() -> Iterator[FailingIO]:
    with FailingIO() as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path, durable: bool, lazy: LazyIO) -> Iterator[TensorStore]:
    with TensorStore(
        tmp_path / "s" if durable else tmp_path, durable=durable, engine=lazy
    ) as opened:
        yield opened


def test_get_waits_for_the_put_before_it(store: TensorStore, lazy: LazyIO) -> None:
    store.put("x", content(1))
    put = store.put_async("x", content(2))
    assert lazy.ran() == ["write"]
    got = store.get_async("x")
    assert lazy.ran() == ["write", "write"], "the write is done, the read in flight"
    assert put.done() and not got.done()
    assert torch.equal(got.result(), content(2))


def test_a_read_keeps_its_content(store: TensorStore, lazy: LazyIO) -> None:
    """It is in flight while its name is put again, deleted, and its space looked for."""
    store.put("x", content(1))
    store.reserve(6 * SIZE * 4)  # there is room elsewhere
    reads = [store.get_async("x")]
    store.put("x", content(2))
    reads.append(store.get_async("x"))
    store.delete("x")
    for number in range(3):
        store.put(str(number), content(10 + number))
    assert not any(read.done() for read in reads)
    for number, read in enumerate(reads):
        assert torch.equal(read.result(), content(number + 1))
    used = store.stats()["used_bytes"]
    assert used == 3 * 20480, "what the reads needed is free now"


def test_a_put_waits_rather_than_grow(store: TensorStore, lazy: LazyIO) -> None:
    store.put_async("x", content(0))
    for number in range(1, 5):
        store.put_async("x", content(number))
        store.get_async("x")
    assert store.stats()["file_bytes"] == 20480
    assert torch.equal(store.get("x"), content(4))


def test_delete_while_the_put_is_in_flight(store: TensorStore, lazy: LazyIO) -> None:
    put = store.put_async("x", content(1))
    store.delete("x")
    assert store.stats()["used_bytes"] == 20480
    store.put("y", content(2))
    put.result()
    assert store.names() == ["y"]
    assert store.stats()["used_bytes"] == 20480
    assert torch.equal(store.get("y"), content(2))


def test_a_put_that_was_overtaken(tmp_path: Path, lazy: LazyIO) -> None:
    with TensorStore(tmp_path, engine=lazy) as store:
        store.reserve(3 * SIZE * 4)
        first = store.put_async("x", content(1))
        lazy.fail(0, errno.EIO)
        store.put("x", content(2))
        assert isinstance(first.exception(), OSError)
        assert torch.equal(store.get("x"), content(2)), "its failure is not that of the second"


def test_wait(store: TensorStore, lazy: LazyIO) -> None:
    for number in range(4):
        store.put_async(str(number), content(number))
    future = store.put_async("x", content(1))
    with pytest.raises(TimeoutError):
        future.result(0)
    with pytest.raises(TimeoutError):
        store.wait(0)
    assert store.stats()["in_flight"] == 5
    assert store.wait(60) == 5
    assert store.stats()["in_flight"] == 0


def test_wait_verifies(tmp_path: Path) -> None:
    """A buffer that was given as `out` may be used after wait(), so that has to tell."""
    with TensorStore(tmp_path / "s", durable=True) as store:
        store.put("x", content(1))
        store._engine.write(content(2)[:1], store._file, 0).result()
        store.get_async("x", content(3))
        with pytest.raises(OSError, match="has crc32c"):
            store.wait()
        store.wait()


def test_a_failed_put_has_no_content(tmp_path: Path, durable: bool, failing: FailingIO) -> None:
    path = tmp_path / "s" if durable else tmp_path
    with TensorStore(path, durable=durable, engine=failing) as store:
        for name in ("x", "y"):
            store.put(name, content(1))
        if durable:
            store.commit()
            store.put("x", content(2))  # not committed, so it will be overwritten in place
        before = store.stats()
        failing.code = errno.EIO
        for _ in range(3):
            with pytest.raises(OSError, match="TensorStore: put of 'x' failed: injected") as caught:
                store.put("x", content(3))
            assert caught.value.errno == errno.EIO
        failing.code = 0
        assert "x" not in store and store.names() == ["y"]
        for call in (store.get, store.get_async, store.info):
            with pytest.raises(OSError, match="put of 'x' failed"):
                call("x")
        assert torch.equal(store.get("y"), content(1)), "others are as they were"
        assert store.stats()["used_bytes"] == before["used_bytes"] - 20480
        if durable:
            with pytest.raises(OSError, match=r"commit of .*: 'x' has no content") as caught:
                store.commit()
            assert caught.value.errno == errno.EIO
        store.put("x", content(4))
        assert torch.equal(store.get("x"), content(4))
        failing.code = errno.EIO
        with pytest.raises(OSError):
            store.put("x", content(5))
        failing.code = 0
        store.delete("x")
        with pytest.raises(KeyError):
            store.get("x")
    assert not durable or TensorStore(path, durable=True).names() == ["y"]


def test_commit_waits_and_tells(tmp_path: Path, failing: FailingIO) -> None:
    path = tmp_path / "s"
    with TensorStore(path, durable=True, engine=failing) as store:
        store.put("x", content(1))
    store = TensorStore(path, durable=True, engine=failing)
    store.put_async("y", content(2))
    failing.code = errno.ENOSPC
    store.put_async("x", content(2))
    with pytest.raises(OSError, match="'x' has no content") as caught:
        store.commit()
    assert caught.value.errno == errno.ENOSPC
    failing.code = 0
    with pytest.raises(OSError, match="put of 'x' failed"):
        store.close()  # nobody has asked the Future
    with TensorStore(path, durable=True) as store:
        assert store.names() == ["x"]
        assert torch.equal(store.get("x"), content(1)), "the disk has the commit before"


def test_commit_waits(tmp_path: Path, lazy: LazyIO) -> None:
    with TensorStore(tmp_path / "s", durable=True, engine=lazy) as store:
        for number in range(5):
            store.put_async(str(number), content(number))
        assert lazy.ran() == []
        store.commit()
        assert lazy.ran() == ["write"] * 5
    with TensorStore(tmp_path / "s", durable=True) as store:
        for number in range(5):
            assert torch.equal(store.get(str(number)), content(number))


def test_failures_that_nobody_asked_about(tmp_path: Path, failing: FailingIO) -> None:
    with TensorStore(tmp_path, engine=failing) as store:
        failing.code = errno.EIO
        store.put_async("x", content(1))
        with pytest.raises(OSError, match="put of 'x' failed"):
            store.wait()
        store.wait()
        store.put_async("x", content(1)).exception()
        failing.code = 0
    store = TensorStore(tmp_path, engine=failing)
    failing.code = errno.EIO
    with pytest.raises(ZeroDivisionError), store:
        store.put_async("x", content(1))
        raise ZeroDivisionError
    store = TensorStore(tmp_path, engine=failing)
    with pytest.raises(OSError, match="put of 'x' failed"), store:
        store.put_async("x", content(1))
    failing.code = 0


def test_a_failed_read(tmp_path: Path, durable: bool, failing: FailingIO) -> None:
    path = tmp_path / "s" if durable else tmp_path
    with TensorStore(path, durable=durable, engine=failing) as store:
        store.put("x", content(1))
        failing.code = errno.EIO
        with pytest.raises(OSError, match="TensorStore: get of 'x' failed: injected"):
            store.get("x")
        failing.code = 0
        assert torch.equal(store.get("x"), content(1)), "the content is not to blame"


def test_a_put_that_was_interrupted(
    tmp_path: Path, durable: bool, lazy: LazyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s" if durable else tmp_path
    with TensorStore(path, durable=durable, engine=lazy) as store:
        store.put("x", content(1))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if durable:
                patch.setattr(tensor_store, "checksum_of", interrupted)
            else:
                patch.setattr(lazy, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put("x", content(2))
        with pytest.raises(RuntimeError, match="put of 'x' was given up: KeyboardInterrupt"):
            store.get("x")
        with monkeypatch.context() as patch:
            store.put("z", content(3))
            patch.setattr(lazy, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get("z")
        assert torch.equal(store.get("z"), content(3))
        store.delete("x")
        assert store.stats()["in_flight"] == 0
        assert store.stats()["used_bytes"] == 20480


def test_close_waits_also_for_what_has_no_future(
    tmp_path: Path, lazy: LazyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorStore(tmp_path / "s", durable=True, engine=lazy)
    monkeypatch.setattr(tensor_store, "checksum_of", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.put("x", content(1))
    assert lazy.ran() == []
    store.close()
    assert lazy.ran() == ["write"], "or it would write into the file of the next one"


@pytest.mark.parametrize("settle", ["wait", "delete", "close"])
@pytest.mark.parametrize("moment", ["begun", "writing", "checksum", "promised"])
def test_a_put_that_was_interrupted_at_any_moment(
    tmp_path: Path, lazy: LazyIO, monkeypatch: pytest.MonkeyPatch, moment: str, settle: str
) -> None:
    """Ctrl-C may come when the request is in the books and nobody has it."""
    store = TensorStore(tmp_path / "s", durable=True, engine=lazy)
    store.put("y", content(1))
    begin = store._ledger.begin_put

    def interrupted(*arguments: object, **_: object) -> None:
        if moment == "begun":
            begin(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    owner, name = {
        "begun": (store._ledger, "begin_put"),
        "writing": (lazy, "write"),
        "checksum": (tensor_store, "checksum_of"),
        "promised": (store, "_future"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put_async("x", content(2))
    assert "x" not in store and store.names() == ["y"]
    for call in (lambda: store.get("x"), lambda: store.info("x"), store.commit):
        with pytest.raises((RuntimeError, OSError), match="put of 'x' was given up: Keyboard"):
            call()
    assert lazy.ran() == ["write"], "it is not waited for where that was not asked"
    if settle == "wait" and moment in ("checksum", "promised"):
        with pytest.raises(TimeoutError, match="was given up is under way after 0 s"):
            store.wait(0)
    if settle != "close":
        store.delete("x") if settle == "delete" else store.wait()
        assert lazy.ran() == ["write"] * len(lazy.jobs)
        assert store.stats()["in_flight"] == 0
        assert store.stats()["used_bytes"] == 20480
        store.put("x", content(3))
        assert torch.equal(store.get("x"), content(3))
    store.close()
    assert len(lazy.ran()) == len(lazy.jobs)


@pytest.mark.parametrize("moment", ["begun", "reading", "promised"])
def test_a_get_that_was_interrupted_at_any_moment(
    tmp_path: Path, lazy: LazyIO, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with TensorStore(tmp_path, engine=lazy) as store:
        store.put("x", content(1))
        begin = store._ledger.begin_get

        def interrupted(*arguments: object, **_: object) -> None:
            if moment == "begun":
                begin(*arguments)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        owner, name = {
            "begun": (store._ledger, "begin_get"),
            "reading": (lazy, "read"),
            "promised": (store, "_future"),
        }[moment]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get_async("x")
        assert store.stats()["in_flight"] == (1 if moment == "promised" else 0)
        store.wait()
        assert store.stats()["in_flight"] == 0
        assert torch.equal(store.get("x"), content(1)), "the content is not to blame"
        store.delete("x")
        assert store.stats()["used_bytes"] == 0


def test_a_failure_keeps_nobody_alive(tmp_path: Path, failing: FailingIO) -> None:
    """It is raised again and again, each time with the frames of one caller."""

    def frames(call: Callable[[], object]) -> int:
        with pytest.raises(OSError) as caught:
            call()
        return len(list(traceback.walk_tb(caught.value.__traceback__)))

    with TensorStore(tmp_path, engine=failing) as store:
        failing.code = errno.EIO
        with pytest.raises(OSError):
            store.put("x", content(1))
        failing.code = 0
        for call in (lambda: store.get("x"), lambda: store.info("x")):
            assert len({frames(call) for _ in range(4)}) == 1
        store.delete("x")
    job = StoreJob("x", "get", lambda _: None)
    job.error = OSError("injected")
    assert len({frames(job.check) for _ in range(4)}) == 1


def test_an_engine_that_was_closed(tmp_path: Path, durable: bool) -> None:
    engine = FailingIO()
    store = TensorStore(tmp_path / "s" if durable else tmp_path, durable=durable, engine=engine)
    store.put("x", content(1))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.put("y", content(1))
    with pytest.raises(RuntimeError, match="closed"):
        store.get("x")
    store.close()


def test_an_interruption_that_leaves_the_start_of_a_request_locked() -> None:
    """Ctrl-C within `start` may do so; the thread that it came to goes on."""
    job = StoreJob("x", "get", lambda _: None)
    job._start.acquire()
    assert not job.wait(0)
    job.start(None)
    assert job.wait(0) and job.done()
