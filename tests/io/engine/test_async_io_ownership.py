"""Who holds what and for how long: memory, descriptors, and failures that somebody must hear of."""

import errno
import gc
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext import io
from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.in_flight import InFlight

SIZE = 4 * BLOCK
CHILD = Path(__file__).with_name("aio_child.py")
PATIENCE = 90.0


# Memory


def replace_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def unset(tensor: torch.Tensor) -> None:
    tensor.set_()  # type: ignore[call-overload]


@pytest.mark.parametrize("take_away", [replace_data, unset])
def test_a_read_keeps_the_memory_that_its_tensor_gives_up(
    engine: io.AsyncIO, tmp_path: Path, take_away: Callable[[torch.Tensor], None]
) -> None:
    (tmp_path / "file").write_bytes(bytes_of(payload(SIZE)))
    with HeldMemory(SIZE) as held:
        users = [sys.getrefcount(held.memory)]
        tensor = held.tensor()
        future = engine.read(tensor, tmp_path / "file")
        held.wait_until_touched()
        take_away(tensor)
        gc.collect()
        users.append(sys.getrefcount(held.memory))
        held.release()
        assert future.result() is tensor
        users.append(sys.getrefcount(held.memory))
        assert held.memory[1 : 1 + SIZE] == bytes_of(payload(SIZE))
    assert users[0] < users[1]
    assert users[0] == users[2]


@pytest.mark.parametrize("take_away", [replace_data, unset])
def test_a_strided_read_fills_the_memory_that_its_tensor_had(
    engine: io.AsyncIO, tmp_path: Path, take_away: Callable[[torch.Tensor], None]
) -> None:
    """Whether a tensor is contiguous makes no difference to where its bytes go."""
    (tmp_path / "file").write_bytes(bytes_of(payload(1000)))
    base = torch.zeros(1000, 2, dtype=torch.uint8)
    tensor = base[:, 0]
    with HeldMemory(SIZE) as held:
        engine.write(held.tensor(), tmp_path / "older")  # so that nobody looks at the read yet
        held.wait_until_touched()
        future = engine.read(tensor, tmp_path / "file")
        take_away(tensor)
    assert future.result() is tensor
    assert torch.equal(base[:, 0], payload(1000))


def freed(nbytes: int) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        tensor = torch.ones(10)[2:]
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    return make


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(10)


SEEMING = {
    "freed": (
        freed(0),
        ValueError,
        "tensor has 0 bytes of memory, expected at least 40: its storage was freed or resized",
    ),
    "shrunk": (
        freed(39),
        ValueError,
        "tensor has 39 bytes of memory, expected at least 40: its storage was freed or resized",
    ),
    "fake": (fake, TypeError, "tensor is a FakeTensor, expected a torch.Tensor that has values"),
    "zero": (
        lambda: torch._efficientzerotensor(10),
        TypeError,
        "tensor is a Tensor, expected a torch.Tensor that has values",
    ),
}


@pytest.mark.parametrize("case", SEEMING)
@pytest.mark.parametrize("what", ["read", "write"])
def test_tensors_without_memory_are_refused(
    engine: io.AsyncIO, tmp_path: Path, what: str, case: str
) -> None:
    make, kind, text = SEEMING[case]
    (tmp_path / "file").write_bytes(bytes(40))
    with pytest.raises(kind, match=f"^AsyncIO.{what}: {re.escape(text)}$"):
        getattr(engine, what)(make(), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == bytes(40)
    assert engine.wait() == 0


def test_memory_that_is_just_enough(engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.arange(10.0)[2:8:2]
    tensor.untyped_storage().resize_(7 * 4)
    engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(torch.tensor([2.0, 4.0, 6.0]))
    empty = torch.ones(10)[:0]
    empty.untyped_storage().resize_(0)
    assert engine.read(empty, tmp_path / "file").result() is empty


@pytest.mark.parametrize("asked", [True, False])
def test_a_failure_lets_its_tensor_go(engine: io.AsyncIO, tmp_path: Path, asked: bool) -> None:
    tensor = torch.zeros(1000)
    seen = weakref.ref(tensor.untyped_storage())
    future = engine.read(tensor, tmp_path / "missing")
    if asked:
        assert isinstance(future.exception(), FileNotFoundError)
    else:
        assert future._job.wait(PATIENCE)
        assert future.done()
    del tensor
    gc.collect()
    assert seen() is None
    assert isinstance(future.exception(), FileNotFoundError)


# Failures


class LateFailure:
    """A job that fails when a test says so."""

    def __init__(self, ended: bool = False) -> None:
        self.ended = ended

    def wait(self, seconds: float) -> bool:
        return self.ended

    def done(self) -> bool:
        return self.ended

    def check(self) -> None:
        raise OSError(errno.EIO, "it failed late")


def test_check_raises_what_nobody_has_looked_at_yet(engine: io.AsyncIO, tmp_path: Path) -> None:
    future = engine.read(torch.zeros(1), tmp_path / "missing")
    assert future._job.wait(PATIENCE)  # the engine has done it, and no Future knows
    with pytest.raises(FileNotFoundError, match="missing"):
        future.check()
    assert engine.wait() == 1  # somebody was told


def test_a_check_that_is_early_hides_nothing() -> None:
    job, in_flight = LateFailure(), InFlight("owner")
    future = io.Future(job, torch.zeros(1))
    in_flight.add(future)
    future.check()
    job.ended = True
    with pytest.raises(OSError, match="it failed late"):
        in_flight.wait(None)


def test_a_failure_costs_the_same_however_many_there_were() -> None:
    looks = 0

    class Counting(io.Future):
        @property
        def collected(self) -> bool:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return self.__dict__.get("was collected", False)

        @collected.setter
        def collected(self, value: bool) -> None:
            self.__dict__["was collected"] = value

    in_flight, count = InFlight("owner"), 4000
    for _ in range(count):
        in_flight.add(Counting(LateFailure(ended=True), torch.zeros(0)))
    assert looks <= 3 * count
    assert len(in_flight.take_untold()) == count


def test_a_wait_that_raises_leaves_the_count_to_the_next(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    engine.read(torch.zeros(1), tmp_path / "missing")
    engine.write(payload(1), tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        engine.wait()
    assert engine.wait() == 2
    assert engine.wait() == 0


def test_failures_that_were_told_are_not_kept(engine: io.AsyncIO, tmp_path: Path) -> None:
    for _ in range(200):
        assert engine.read(torch.zeros(1), tmp_path / "missing").exception() is not None
    assert len(engine._in_flight._failed) <= 1


def test_close_reports_every_failure_of_threads_that_go_on(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="deepspeed_ext")
    engine = io.AsyncIO(queue_depth=4, backend=backend)
    accepted: list[str] = []
    refused: list[BaseException] = []
    enough = threading.Event()

    def submit(number: int) -> None:
        try:
            for i in range(1_000_000):
                path = f"{tmp_path}/missing/{number}-{i}."
                engine.write(torch.zeros(1), path)
                accepted.append(path)
                if i == 20:
                    enough.set()
        except RuntimeError as error:
            refused.append(error)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    enough.wait(PATIENCE)
    with pytest.raises(FileNotFoundError) as caught:
        engine.close()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    told = " ".join([str(caught.value), *caplog.messages])
    untold = set(accepted) - {word for word in told.split() if word.startswith(str(tmp_path))}
    assert not untold, f"{len(untold)} of {len(accepted)}"
    assert not engine._in_flight.take_untold()


class Slow:
    """The native engine, which a submitting thread leaves only when a test lets it."""

    def __init__(self, native_engine: Any) -> None:
        self.native_engine = native_engine
        self.entered, self.leave = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.native_engine, name)

    def submit(self, *arguments: object, **how: bool) -> object:
        job = self.native_engine.submit(*arguments, **how)
        self.entered.set()
        self.leave.wait(PATIENCE)
        return job


def test_a_failure_that_comes_while_the_engine_closes_is_told(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has taken the transfer, and close ends before its Future is there."""
    engine = io.AsyncIO(backend=backend)
    engine._engine = slow = Slow(engine._engine)
    told: list[BaseException] = []

    def close() -> None:
        try:
            engine.close()
        except OSError as failure:
            told.append(failure)

    writer = threading.Thread(
        target=engine.write, args=(torch.zeros(1), tmp_path / "missing" / "file")
    )
    writer.start()
    assert slow.entered.wait(PATIENCE)
    closer = threading.Thread(target=close)
    closer.start()
    closer.join(0.2)  # it may wait for the writer, or not
    slow.leave.set()
    writer.join()
    closer.join()
    assert "missing/file" in str(told) + "".join(caplog.messages)
    assert not engine._in_flight.take_untold()


# Descriptors and locked memory


def open_names() -> list[str]:
    """Return what the descriptors of this process are open on."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one of this listing
            continue
    return names


@pytest.mark.parametrize("opened", [True, False])
def test_a_future_holds_no_descriptor(engine: io.AsyncIO, tmp_path: Path, opened: bool) -> None:
    path, tensor = tmp_path / "file", payload(SIZE)
    file = io.File(str(path), "update") if opened else None
    target: io.PathOrFile = path if file is None else file
    futures = [engine.write(tensor, target), engine.write(tensor, target, 1 << 60)]
    futures[0].result()
    assert futures[1].exception() is not None  # past what a file may have
    futures.append(engine.read(torch.zeros_like(tensor), target))
    futures[2].result()
    assert str(path) in "".join(open_names()) or not opened
    if file is not None:
        file.close()
    assert str(path) not in "".join(open_names())
    assert all(future.done() for future in futures)


def held_of_the_kernel() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    found = {name: int(kib) for name, kib in re.findall(r"(VmLck|VmPin|Threads):\s+(\d+)", status)}
    return found | {"descriptors": len(os.listdir("/proc/self/fd"))}


def test_a_closed_engine_holds_nothing(backend: str, tmp_path: Path) -> None:
    io.AsyncIO(backend=backend).close()  # loads what it needs
    gc.collect()
    before = held_of_the_kernel()
    engine = io.AsyncIO(threads=2, queue_depth=4, backend=backend)
    future = engine.write(payload(SIZE + 1)[1:], tmp_path / "file")  # through the engine's pages
    future.result()
    assert held_of_the_kernel() != before
    engine.close()
    assert held_of_the_kernel() == before
    assert engine.stats()["completed"] == 1 and future.done()


def test_memory_can_be_registered_and_dropped_around_a_close(backend: str, tmp_path: Path) -> None:
    before = held_of_the_kernel()
    engine = io.AsyncIO(backend=backend)
    buffers = [io.PinnedBuffer(1 << 16) for _ in range(2)]
    engine.register(buffers[0])
    engine.write(buffers[0].tensor(), tmp_path / "file").result()
    engine.close()
    engine.register(buffers[1])  # nothing is left that could know it
    buffers.clear()
    gc.collect()
    assert held_of_the_kernel() == before


# The end of the interpreter


def test_daemon_threads_may_still_wait_when_python_ends(tmp_path: Path) -> None:
    native()  # if it has to be compiled, then before the clock runs
    done = warm_python.run(CHILD, "daemons", tmp_path, "threads", timeout=PATIENCE)
    if "Skipped" in done.stderr:
        pytest.skip("userfaultfd is refused here")
    assert (done.returncode, done.stderr) == (0, "")
