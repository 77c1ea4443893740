"""Futures as users of concurrent.futures and asyncio know them."""

import asyncio
import concurrent.futures
import errno
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError
from pathlib import Path

import pytest
import torch
import warm_python
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory

from deepspeed_ext import io

SIZE = 4 * BLOCK
PATIENCE = 90.0
THREAD = "deepspeed_ext-futures"


@pytest.fixture
def held() -> Iterator[HeldMemory]:
    with HeldMemory(SIZE) as memory:
        yield memory


@pytest.fixture
def two(backend: str) -> Iterator[io.AsyncIO]:
    """An engine with a thread that goes on while held memory stops the other one."""
    with io.AsyncIO(block_size=SIZE, threads=2, backend=backend) as opened:
        yield opened


def write_held(engine: io.AsyncIO, held: HeldMemory, path: Path) -> io.Future:
    """Begin a write that does not end before held.release(...)."""
    future = engine.write(held.tensor(), path)
    held.wait_until_touched()
    return future


class Ended:
    """A callback that a test can wait for."""

    def __init__(self) -> None:
        self.calls: list[tuple[io.Future, str]] = []
        self.threads: set[int] = set()
        self._called = threading.Event()

    def __call__(self, future: io.Future) -> None:
        self.calls.append((future, threading.current_thread().name))
        self.threads.add(threading.get_ident())
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(PATIENCE)


# Callbacks


def test_a_callback_is_called_once_by_the_engine_s_thread(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    future, ended = write_held(engine, held, tmp_path / "file"), Ended()
    future.add_done_callback(ended)
    assert not ended.calls
    held.release(bytes_of(payload(SIZE)))
    ended.wait()
    assert future.done() and ended.calls == [(future, THREAD)]
    assert future.result() is not None
    late = Ended()
    future.add_done_callback(late)  # it has ended: at once, here
    assert late.calls == [(future, threading.current_thread().name)]
    assert len(ended.calls) == 1


def test_callbacks_of_many_come_as_these_end(
    two: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    """One that takes long holds up nobody else; one thread calls them all."""
    slow, order = write_held(two, held, tmp_path / "slow"), Ended()
    slow.add_done_callback(order)
    quick = Ended()
    futures = [two.write(payload(100), tmp_path / f"{i}") for i in range(50)]
    left = threading.Semaphore(0)
    for future in futures:
        future.add_done_callback(quick)
        future.add_done_callback(lambda _: left.release())
    for _ in futures:
        assert left.acquire(timeout=PATIENCE)
    assert {future for future, _ in quick.calls} == set(futures) and not order.calls
    held.release()
    order.wait()
    assert quick.threads == order.threads and len(order.threads) == 1


def test_callbacks_keep_their_order_and_what_they_raise_is_logged(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    future, seen = write_held(engine, held, tmp_path / "file"), []
    last = Ended()

    def fail(_: io.Future) -> None:
        seen.append("fail")
        raise ZeroDivisionError("on purpose")

    def leave(_: io.Future) -> None:
        seen.append("leave")
        sys.exit(3)

    for call in (fail, leave, lambda _: seen.append("last"), last):
        future.add_done_callback(call)
    assert future.remove_done_callback(print) == 0
    dropped = Ended()
    future.add_done_callback(dropped)
    assert future.remove_done_callback(dropped) == 1
    held.release()
    last.wait()
    assert seen == ["fail", "leave", "last"] and not dropped.calls
    text = caplog.text
    assert "a callback of write at offset 0 of" in text and "on purpose" in text
    after = Ended()  # the thread lives on
    engine.write(payload(5), tmp_path / "other").add_done_callback(after)
    after.wait()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_exit_in_a_callback_that_is_called_at_once_reach_the_caller(
    engine: io.AsyncIO, tmp_path: Path, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    future = engine.write(payload(5), tmp_path / "file")
    future.result()

    def leave(_: io.Future) -> None:
        raise kind("on purpose")

    with pytest.raises(kind, match="on purpose"):
        future.add_done_callback(leave)
    assert not caplog.records
    future.add_done_callback(lambda _: [][0])  # anything else is logged, as it is later
    assert "IndexError" in caplog.text


def test_the_thread_of_callbacks_ends_and_everything_goes(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    tensor, ended = payload(SIZE), Ended()
    future = engine.write(tensor, tmp_path / "file")
    future.add_done_callback(ended)
    ended.wait()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    again = Ended()
    later = engine.write(tensor, tmp_path / "file")
    later.add_done_callback(again)
    again.wait()  # by another thread
    gone = weakref.ref(future)
    ended.calls.clear()
    del future, tensor
    gc.collect()
    assert gone() is None
    assert not engine._in_flight._watcher._watched


def test_a_failure_that_only_a_callback_saw_is_still_raised(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    ended = Ended()
    engine.read(torch.zeros(1), tmp_path / "missing").add_done_callback(ended)
    ended.wait()
    with pytest.raises(FileNotFoundError):
        engine.wait()


def test_python_ends_after_the_callbacks(tmp_path: Path) -> None:
    code = """
import sys, torch
from deepspeed_ext import io
engine = io.AsyncIO()
future = engine.write(torch.zeros(5_000_000), sys.argv[1])
future.add_done_callback(lambda done: print("called", done.exception(), flush=True))
"""
    done = warm_python.run("-c", code, tmp_path / "file", timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "called None\n", "")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["threading.Thread.start", "io.Future.tell"])
def test_ctrl_c_while_a_callback_is_added_does_not_keep_python_from_its_end(
    held: HeldMemory, tmp_path: Path, place: str, when: str
) -> None:  # the fixture skips where the child could not hold memory
    code = f"""
import sys, threading, torch
from deepspeed_ext import io
from held_memory import HeldMemory
with HeldMemory({SIZE}) as held, io.AsyncIO() as engine:
    first, second = (engine.write(held.tensor(), sys.argv[1]) for _ in range(2))
    held.wait_until_touched()  # neither has ended, or its callback would be called at once
    real = {place}
    def interrupted(self, *arguments):
        {"real(self, *arguments)" if when == "after" else "pass"}
        raise KeyboardInterrupt
    {place} = interrupted
    try:
        first.add_done_callback(lambda future: print("first"))
    except KeyboardInterrupt:
        {place} = real
        second.add_done_callback(lambda future: print("second"))
    held.release()
"""
    here = Path(__file__).parent
    done = warm_python.run("-c", code, tmp_path / "file", cwd=here, timeout=PATIENCE)
    said = (done.returncode, sorted(done.stdout.split()), done.stderr)
    assert said == (0, ["first", "second"], "")


def test_in_a_forked_child_only_what_has_ended_can_be_asked(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    ended = engine.write(payload(5), tmp_path / "ended")
    ended.result()
    future = write_held(engine, held, tmp_path / "file")
    future.add_done_callback(print)
    if (child := os.fork()) == 0:
        code = 1
        for use in (
            lambda: future.add_done_callback(print),
            future.cancel,
            future.running,
            lambda: concurrent.futures.wait([future], 1),
        ):
            try:
                use()
            except RuntimeError as error:
                assert "which began it" in str(error)
            else:
                os._exit(2)
        calls: list[io.Future] = []
        ended.add_done_callback(calls.append)
        code = 0 if calls == [ended] and concurrent.futures.wait([ended]).done == {ended} else 3
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    held.release()
    future.result()


# Cancelling


def test_only_what_has_not_begun_is_cancelled(
    backend: str, held: HeldMemory, tmp_path: Path
) -> None:
    with io.AsyncIO(block_size=SIZE, queue_depth=1, backend=backend) as engine:
        # One copies to held memory, and its thread with it; what comes later stays in the queue.
        begun = write_held(engine, held, tmp_path / "begun")
        assert begun.running() and not begun.cancel() and not begun.cancelled()
        tensor, called = payload(SIZE), Ended()
        waiting = engine.write(tensor, tmp_path / "waiting")
        kept = engine.write(tensor, tmp_path / "kept")
        waiting.add_done_callback(called)
        assert not waiting.running() and not waiting.done()
        assert waiting.cancel() and waiting.cancel()
        called.wait()
        assert waiting.cancelled() and waiting.done() and not waiting.running()
        for ask in (waiting.result, waiting.exception, waiting.check):
            with pytest.raises(CancelledError, match=r"write at .*waiting was cancelled"):
                ask()
        gone = weakref.ref(tensor.untyped_storage())
        assert "CancelledError" in repr(waiting)
        held.release()
        begun.result()
        kept.result()
        assert not kept.cancel() and not kept.cancelled()
        assert engine.wait() == 3  # nobody has to hear of it again
        stats = engine.stats()
        assert (stats["submitted"], stats["completed"], stats["cancelled"]) == (3, 2, 1)
        del tensor, kept
        gc.collect()
        assert gone() is None
    assert not (tmp_path / "waiting").exists()


def test_a_cancelled_future_keeps_no_file_open(
    backend: str, held: HeldMemory, tmp_path: Path
) -> None:
    with io.AsyncIO(block_size=SIZE, queue_depth=1, backend=backend) as engine:
        begun = write_held(engine, held, tmp_path / "begun")
        file = io.File(str(tmp_path / "file"), "write")
        descriptor = file.fileno()
        future = engine.write(payload(5), file)
        file.close()
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("file")
        assert future.cancel()
        assert not any(
            name.endswith("/file")
            for number in os.listdir("/proc/self/fd")
            if (name := os.path.realpath(f"/proc/self/fd/{number}"))
        )
        held.release()
        begun.result()
    assert (tmp_path / "file").read_bytes() == b""


def test_cancelling_beside_workers_that_take_requests(backend: str, tmp_path: Path) -> None:
    """Each of many ends in one way or the other, and its file is there or not accordingly."""
    with io.AsyncIO(block_size=8192, queue_depth=2, threads=2, backend=backend) as engine:
        futures = [engine.write(payload(9000, seed=i), tmp_path / f"{i}") for i in range(400)]
        cancelled = [i for i in reversed(range(400)) if futures[i].cancel()]
        assert concurrent.futures.wait(futures).done == set(futures)
        for i, future in enumerate(futures):
            assert future.cancelled() == (i in cancelled)
            assert (tmp_path / f"{i}").exists() == (i not in cancelled)
        assert engine.wait() == 400
        # Asked for by a read, which comes behind them all.
        engine.read(torch.zeros(1), "/dev/zero").result()
        stats = engine.stats()
        assert (stats["completed"], stats["cancelled"]) == (401 - len(cancelled), len(cancelled))


def test_requests_of_a_store_are_not_taken_back(tmp_path: Path) -> None:
    with io.TensorStore(tmp_path) as store:
        future, ended = store.put_async("name", payload(SIZE)), Ended()
        future.add_done_callback(ended)
        assert not future.cancel()
        ended.wait()
        assert torch.equal(asyncio.run(awaited(store.get_async("name"))), payload(SIZE))


# concurrent.futures


def test_it_is_one_of_concurrent_futures(engine: io.AsyncIO, tmp_path: Path) -> None:
    future = engine.write(payload(5), tmp_path / "file")
    assert isinstance(future, concurrent.futures.Future)
    future.result()
    for setter in (future.set_result, future.set_exception):
        with pytest.raises(RuntimeError, match="expected its engine to do so"):
            setter(None)
    with pytest.raises(RuntimeError, match="is set"):
        future.set_running_or_notify_cancel()


def test_a_timeout_is_that_of_concurrent_futures(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    future = write_held(engine, held, tmp_path / "file")
    for kind in (TimeoutError, concurrent.futures.TimeoutError):
        with pytest.raises(kind):
            future.result(0)


def test_wait_and_as_completed(two: io.AsyncIO, held: HeldMemory, tmp_path: Path) -> None:
    slow = write_held(two, held, tmp_path / "slow")
    quick = two.write(payload(5), tmp_path / "quick")
    done, left = concurrent.futures.wait([slow, quick], return_when=FIRST_COMPLETED)
    assert (done, left) == ({quick}, {slow})
    assert concurrent.futures.wait([slow, quick], timeout=0.01) == ({quick}, {slow})
    bad = two.read(torch.zeros(1), tmp_path / "missing")
    done, left = concurrent.futures.wait([slow, bad], return_when=FIRST_EXCEPTION)
    assert (done, left) == ({bad}, {slow})
    order = concurrent.futures.as_completed([slow, quick, bad])
    assert {next(order), next(order)} == {quick, bad}
    held.release()
    assert next(order) is slow
    assert concurrent.futures.wait([slow, quick, bad]).not_done == set()
    with pytest.raises(FileNotFoundError):
        bad.result()  # to wait is not to be told


@pytest.mark.parametrize("function", ["wait", "as_completed"])
def test_many_at_once(engine: io.AsyncIO, tmp_path: Path, function: str) -> None:
    """While other threads ask each of them how it ended, and with a real executor's beside them."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for round_ in range(10):
            futures = [engine.write(payload(3000), tmp_path / f"{i}") for i in range(40)]
            asked = [pool.submit(future.result) for future in futures]
            everything = {*futures, *asked}
            if function == "wait":
                done, left = concurrent.futures.wait(everything)
                assert (done, left) == (everything, set()), round_
            else:
                assert set(concurrent.futures.as_completed(everything, PATIENCE)) == everything


# asyncio


async def awaited(future: io.Future) -> torch.Tensor:
    return await future


def test_a_coroutine_awaits(engine: io.AsyncIO, tmp_path: Path) -> None:
    async def main() -> None:
        tensor = payload(SIZE)
        assert await engine.write(tensor, tmp_path / "file") is tensor
        reads = [engine.read(torch.zeros(BLOCK).byte(), tmp_path / "file") for _ in range(20)]
        for got in await asyncio.gather(*reads):
            assert torch.equal(got, tensor[:BLOCK])
        wrapped = asyncio.wrap_future(engine.read(torch.zeros_like(tensor), tmp_path / "file"))
        assert torch.equal(await asyncio.wait_for(wrapped, PATIENCE), tensor)
        with pytest.raises(FileNotFoundError):
            await engine.read(torch.zeros(1), tmp_path / "missing")

    asyncio.run(main())
    engine.wait()  # somebody was told of the failure


def test_asyncio_wait_takes_it_as_it_is(two: io.AsyncIO, held: HeldMemory, tmp_path: Path) -> None:
    async def main() -> None:
        slow = write_held(two, held, tmp_path / "slow")
        quick = two.write(payload(5), tmp_path / "quick")
        done, left = await asyncio.wait([slow, quick], return_when=asyncio.FIRST_COMPLETED)
        assert (done, left) == ({quick}, {slow})
        assert not slow._callbacks
        called: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        slow.add_done_callback(lambda _: called.set_result(threading.current_thread().name))
        held.release()
        assert await called == threading.current_thread().name
        assert (await asyncio.wait([slow, quick]))[0] == {slow, quick}

    asyncio.run(main())


def test_a_coroutine_that_is_cancelled_leaves_the_transfer(
    backend: str, held: HeldMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with io.AsyncIO(block_size=SIZE, queue_depth=1, backend=backend) as engine:
        begun = write_held(engine, held, tmp_path / "begun")
        waiting = engine.write(payload(5), tmp_path / "waiting")

        async def main() -> None:
            for future in (begun, waiting):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(future, 0.01)

        asyncio.run(main())
        assert waiting.cancelled() and not begun.done()  # the loop is closed by now
        held.release(bytes_of(payload(SIZE)))
        begun.result()
        ended = Ended()
        engine.write(payload(5), tmp_path / "last").add_done_callback(ended)
        ended.wait()  # and the callback of the closed loop was before
    assert (tmp_path / "begun").read_bytes() == bytes_of(payload(SIZE))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_callback_of_a_coroutine_is_called_although_its_loop_is_closed(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    ended = Ended()

    async def main() -> None:
        write_held(engine, held, tmp_path / "file").add_done_callback(ended)

    asyncio.run(main())
    assert not ended.calls
    held.release()
    ended.wait()
    assert [name for _, name in ended.calls] == [THREAD]


def test_what_asyncio_asks_from_python_3_14_on(
    backend: str, held: HeldMemory, tmp_path: Path
) -> None:
    with io.AsyncIO(block_size=SIZE, queue_depth=1, backend=backend) as engine:
        begun = write_held(engine, held, tmp_path / "begun")
        waiting = engine.write(payload(5), tmp_path / "waiting")
        assert begun._get_snapshot() == waiting._get_snapshot() == (False, False, None, None)
        assert waiting.cancel()
        assert waiting._get_snapshot() == (True, True, None, None)
        held.release()
        assert_snapshots(engine, tmp_path)


def assert_snapshots(engine: io.AsyncIO, tmp_path: Path) -> None:
    good = engine.write(payload(5), tmp_path / "file")
    bad = engine.read(torch.zeros(1), tmp_path / "missing")
    concurrent.futures.wait([good, bad])
    assert good._get_snapshot() == (True, False, good.result(), None)
    done, cancelled, result, failure = bad._get_snapshot()
    assert (done, cancelled, result) == (True, False, None)
    assert isinstance(failure, OSError) and failure.errno == errno.ENOENT
    engine.wait()  # that was telling
