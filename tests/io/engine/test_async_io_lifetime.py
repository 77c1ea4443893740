"""Time: waits that end early, things that go while work is under way, and many operations."""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory

from deepspeed_ext import io

SIZE = 4 * BLOCK
PATIENCE = 90.0


@pytest.fixture
def held() -> Iterator[HeldMemory]:
    with HeldMemory(SIZE) as memory:
        yield memory


def main_frame() -> object:
    """Return where the main thread is: its file and line."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_filename, frame.f_lineno


class WhenWaiting(threading.Thread):
    """Call a function once the main thread waits inside the package."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.start()

    def run(self) -> None:
        package = os.path.dirname(io.__file__)
        while not str(main_frame()[0]).startswith(package):
            pass
        self.call()


def write_held(engine: io.AsyncIO, held: HeldMemory, path: Path) -> io.Future:
    """Begin a write that does not end before held.release(...)."""
    future = engine.write(held.tensor(), path)
    held.wait_until_touched()
    return future


# Waits that end early


WAITS: dict[str, Callable[[io.AsyncIO, io.Future, float | None], object]] = {
    "result": lambda engine, future, timeout: future.result(timeout),
    "exception": lambda engine, future, timeout: future.exception(timeout),
    "wait": lambda engine, future, timeout: engine.wait(timeout),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_timeout_leaves_the_transfer_alone(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path, wait: str
) -> None:
    future = write_held(engine, held, tmp_path / "file")
    for timeout in (0, 0.0, 0.01, 0.25):
        with pytest.raises(TimeoutError, match=f"{timeout} s"):
            WAITS[wait](engine, future, timeout)
    assert not future.done()
    held.release(bytes_of(payload(SIZE)))
    WAITS[wait](engine, future, PATIENCE)
    assert future.done()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(SIZE))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise; a shell lets its background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_and_not_the_transfer(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path, wait: str
) -> None:
    future = write_held(engine, held, tmp_path / "file")
    for _ in range(2):
        helper = WhenWaiting(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](engine, future, None)
        helper.join()
    held.release(bytes_of(payload(SIZE)))
    WAITS[wait](engine, future, None)
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(SIZE))
    engine.write(payload(10), tmp_path / "more").result()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_gets_through_close(backend: str, held: HeldMemory, tmp_path: Path) -> None:
    engine = io.AsyncIO(backend=backend)
    future = write_held(engine, held, tmp_path / "file")
    watchdog = threading.Timer(30, held.release)  # or a close that never ends
    watchdog.start()
    helper = WhenWaiting(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    helper.join()
    watchdog.cancel()
    assert not future.done()
    held.release(bytes_of(payload(SIZE)))
    engine.close()
    future.result()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(SIZE))
    with pytest.raises(RuntimeError, match="closed"):
        engine.write(payload(10), tmp_path / "file")


@pytest.mark.parametrize("wait", [*WAITS, "close"])
def test_other_threads_run_during_every_wait(
    backend: str,
    held: HeldMemory,
    tmp_path: Path,
    wait: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a thread that can count ends the transfer that the wait is for."""
    monkeypatch.setattr(
        "deepspeed_ext.io.engine.future._SLICE", 3600.0
    )  # one wait, without a pause
    count = 0

    def count_up() -> None:
        nonlocal count
        while count < 100_000:
            count += 1
        held.release()

    with io.AsyncIO(backend=backend) as engine:
        future = write_held(engine, held, tmp_path / "file")
        counter = WhenWaiting(count_up)
        if wait == "close":
            engine.close()
        else:
            WAITS[wait](engine, future, None)
        assert count == 100_000
        counter.join()


class Interrupted:
    """The native engine, with Ctrl-C right after it was given a transfer."""

    def __init__(self, native_engine: Any) -> None:
        self.native_engine = native_engine

    def __getattr__(self, name: str) -> object:
        return getattr(self.native_engine, name)

    def submit(self, *arguments: object, **how: bool) -> None:
        self.native_engine.submit(*arguments, **how)
        raise KeyboardInterrupt


def test_ctrl_c_during_a_submission_leaves_the_memory_alive(
    backend: str, held: HeldMemory, tmp_path: Path
) -> None:
    """What the engine was given it needs, although nobody has a Future of it."""
    users = [sys.getrefcount(held.memory)]
    engine = io.AsyncIO(block_size=BLOCK, backend=backend)
    engine._engine = Interrupted(engine._engine)
    with pytest.raises(KeyboardInterrupt):
        engine.write(held.tensor(), tmp_path / "file")
    gc.collect()
    users.append(sys.getrefcount(held.memory))
    held.wait_until_touched()
    held.release(bytes_of(payload(SIZE)))
    engine.close()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(SIZE))
    assert users[1] > users[0]
    del engine
    gc.collect()
    users.append(sys.getrefcount(held.memory))
    assert users[2] == users[0]


# Things that go


def test_a_read_lands_after_its_tensor_and_future_are_gone(
    engine: io.AsyncIO, held: HeldMemory, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes_of(payload(SIZE)))
    users = [sys.getrefcount(held.memory)]
    tensor = held.tensor()
    future = engine.read(tensor, tmp_path / "file")
    held.wait_until_touched()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    del tensor, future
    gc.collect()
    users.append(sys.getrefcount(held.memory))
    held.release()
    assert engine.wait() == 1
    gc.collect()
    users.append(sys.getrefcount(held.memory))
    assert users[0] < users[1]  # the engine keeps what it still fills
    assert users[0] == users[2]
    assert held.memory[1 : 1 + SIZE] == bytes_of(payload(SIZE))


def test_what_is_done_is_let_go_without_a_wait(engine: io.AsyncIO, tmp_path: Path) -> None:
    """Who never asks does not collect tensors for ever."""
    first = payload(SIZE)
    seen = weakref.ref(first.untyped_storage())
    engine.write(first, tmp_path / "file")
    del first
    until = time.monotonic() + PATIENCE
    while seen() is not None and time.monotonic() < until:
        engine.write(payload(10), tmp_path / "other").result()
    assert seen() is None


@pytest.mark.parametrize("strided", [False, True])
def test_dropping_all_of_it_drains(
    backend: str, held: HeldMemory, tmp_path: Path, strided: bool
) -> None:
    engine = io.AsyncIO(block_size=BLOCK, queue_depth=2, backend=backend)
    other = torch.randn(200, 300)
    engine.write(held.tensor(), tmp_path / "file")
    engine.write(other.t() if strided else other.clone(), tmp_path / "other")
    held.wait_until_touched()
    gone = weakref.ref(engine)
    helper = WhenWaiting(lambda: held.release(bytes_of(payload(SIZE))))
    del engine
    gc.collect()
    assert gone() is None
    helper.join()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(SIZE))
    assert (tmp_path / "other").read_bytes() == bytes_of(other.t() if strided else other)


def test_a_future_outlives_its_engine(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes_of(payload(SIZE)))
    engine = io.AsyncIO(backend=backend)
    good = engine.read(torch.zeros(SIZE // 2, 2, dtype=torch.uint8).t(), tmp_path / "file")
    bad = engine.read(torch.zeros(1), tmp_path / "missing")
    del engine
    gc.collect()
    assert bytes_of(good.result()) == bytes_of(payload(SIZE))
    assert isinstance(bad.exception(), FileNotFoundError)


def test_a_failure_that_nobody_asked_for_is_logged(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="deepspeed_ext")
    engine = io.AsyncIO(backend=backend)
    told = engine.read(torch.zeros(1), tmp_path / "told")
    assert told.exception() is not None
    for number in (1, 2):
        engine.read(torch.zeros(1), tmp_path / f"untold {number}")
        while engine.stats()["failed"] != number + 1:  # so that the next one finds it ended
            pass
    engine.write(payload(1), tmp_path / "good")
    del engine
    gc.collect()
    (line,) = [m for m in caplog.messages if "/untold 1" in m]
    assert "No such file or directory" in line
    assert any("/untold 2" in message for message in caplog.messages)
    assert not any("/told" in message for message in caplog.messages)


def test_eight_threads_on_one_engine(engine: io.AsyncIO, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                path, tensor = tmp_path / f"{number}-{i % 3}", payload(BLOCK + 997 * i, seed=i)
                engine.write(tensor, path, truncate=True).result()
                shape = (tensor.numel(), 2) if i % 2 else (tensor.numel(), 1)
                got = torch.zeros(shape, dtype=torch.uint8)[:, 0]
                assert torch.equal(engine.read(got, path).result(), tensor)
                missing = engine.read(got, tmp_path / "missing").exception()
                assert isinstance(missing, FileNotFoundError)
                with contextlib.suppress(FileNotFoundError):  # of another thread, not asked yet
                    engine.wait(PATIENCE)
                engine.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    stats = engine.stats()
    assert (stats["completed"], stats["failed"]) == (8 * 40, 8 * 20)


# Many of them


def standing() -> dict[str, int]:
    """Return what this process holds of the system, after all garbage is gone."""
    gc.collect()
    text = Path("/proc/self/status").read_text()
    status = dict(line.split(":", 1) for line in text.splitlines())
    found = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
    # The kernel starts and ends workers of io_uring as it likes.
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    ours = [name for name in names if not name.startswith("iou-")]
    return found | {"threads": len(ours), "descriptors": len(os.listdir("/proc/self/fd"))}


@pytest.mark.parametrize("count", [33_000])
def test_a_hundred_thousand_operations_leave_nothing_behind(
    backend: str, tmp_path: Path, count: int
) -> None:
    """33,000 for each backend, besides warming up: by path and by File, good and bad, strided."""
    small, strided, got = payload(700), payload(1400)[::2], torch.zeros(700, dtype=torch.uint8)
    unaligned = payload(3 * 4096 + 1)[1:]
    file = io.File(str(tmp_path / "file"), "update")
    file.truncate(100_000)

    def run(engine: io.AsyncIO, rounds: int) -> None:
        for i in range(rounds):
            engine.write(small, file, offset=i % 50 * 700)
            engine.read(got, file, offset=90_000)
            engine.write(strided, file, offset=50 * 700)
            if i % 10 == 0:
                engine.write(unaligned, tmp_path / "path")
                assert engine.read(got, tmp_path / "missing").exception() is not None
                assert engine.wait() >= 3

    with io.AsyncIO(block_size=4096, backend=backend) as engine:
        run(engine, 1000)
        engine.wait()
        before = standing()
        run(engine, count // 3)
        engine.wait()
        after = standing()
    growth = {name: after[name] - before[name] for name in before}
    assert growth.pop("VmRSS") < 4096, growth  # KiB; 40 bytes for each operation would be seen
    assert growth == {"VmLck": 0, "VmPin": 0, "threads": 0, "descriptors": 0}


def test_engines_leave_nothing_behind(backend: str, tmp_path: Path) -> None:
    def run(count: int) -> None:
        for _ in range(count):
            engine = io.AsyncIO(threads=2, queue_depth=4, backend=backend)
            engine.write(payload(5), tmp_path / "file")
            engine.write(payload(2 * 4096 + 1)[1:], tmp_path / "file")
            del engine

    run(3)
    before = standing()
    run(10)
    after = standing()
    assert after["VmRSS"] - before["VmRSS"] < 4096
    for name in ("VmLck", "VmPin", "threads", "descriptors"):
        assert after[name] == before[name], name
