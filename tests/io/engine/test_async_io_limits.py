"""The process and its limits: space, descriptors, pipes, signals, forks."""

import contextlib
import errno
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm_python
from aio_cases import BLOCK, bytes_of, payload

from deepspeed_ext import io
from deepspeed_ext.io._native import native

MIB = 1 << 20
CHILD = Path(__file__).with_name("aio_child.py")
PATIENCE = 90.0
SIGSETXID = 33


# Space


def free_bytes(folder: Path) -> int:
    os.sync()  # what was written has its place only then
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("opened", [True, False])
def test_what_does_not_fit_changes_nothing(
    engine: io.AsyncIO, small_disk: Path, opened: bool
) -> None:
    path, content = small_disk / "file", bytes_of(payload(MIB + 77))
    path.write_bytes(content)
    free = free_bytes(small_disk)
    tensor = torch.zeros(free + len(content) + 4 * MIB, dtype=torch.uint8)
    target = io.File(str(path), "update") if opened else path
    error = engine.write(tensor, target, truncate=True).exception()
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert f"{path} " in str(error) and f"; {free} bytes are free there" in str(error)
    assert path.read_bytes() == content
    assert free_bytes(small_disk) == free
    engine.write(payload(MIB, seed=1), target).result()  # which is not in the way of what fits
    assert path.read_bytes() == bytes_of(payload(MIB, seed=1)) + content[MIB:]


def test_a_reservation_that_does_not_fit_takes_nothing(small_disk: Path) -> None:
    file = io.File(str(small_disk / "file"), "update")
    free = free_bytes(small_disk)
    text = rf"reserving {free + MIB} bytes at offset 0 of {re.escape(file.path)} failed"
    with pytest.raises(OSError, match=text) as caught:
        file.allocate(0, free + MIB)
    assert caught.value.errno == errno.ENOSPC
    assert file.size() == 0
    assert free_bytes(small_disk) == free
    file.allocate(0, free - MIB)
    file.allocate(0, free - MIB // 2)  # most of which it has
    assert file.size() == free - MIB // 2


# Descriptors


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open no more than so many beyond those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def all_descriptors_but(spare: int) -> Iterator[None]:
    """Use up the descriptors of this process, but for so many."""
    with few_descriptors(100):
        used = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    used.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(spare):
                os.close(used.pop())
            yield
        finally:
            for descriptor in used:
                os.close(descriptor)


def test_thousands_of_paths_behind_a_large_write(backend: str, tmp_path: Path) -> None:
    large, small = payload(8 * MIB), payload(100)
    with (
        few_descriptors(120),
        io.AsyncIO(block_size=BLOCK, queue_depth=128, threads=2, backend=backend) as engine,
    ):
        engine.write(large, tmp_path / "large")
        for i in range(3000):
            engine.write(small, tmp_path / f"{i}")
        assert engine.wait(PATIENCE) == 3001
    assert (tmp_path / "large").read_bytes() == bytes_of(large)
    for i in range(3000):
        assert (tmp_path / f"{i}").read_bytes() == bytes_of(small)


@pytest.mark.parametrize("spare", [1, 2, 3])
def test_the_last_descriptors_are_shared(backend: str, tmp_path: Path, spare: int) -> None:
    """Who finds none waits for a transfer that has one: none of them fails."""
    small = payload(100)
    with io.AsyncIO(queue_depth=4, threads=3, backend=backend) as engine:
        with all_descriptors_but(spare):
            futures = [engine.write(small, tmp_path / f"{i}") for i in range(300)]
            errors = [future.exception(PATIENCE) for future in futures]
        assert not any(errors), {str(error) for error in errors}


def test_no_descriptor_at_all_is_an_error_at_once(backend: str, tmp_path: Path) -> None:
    small = payload(100)
    with io.AsyncIO(queue_depth=4, threads=2, backend=backend) as engine:
        with all_descriptors_but(0):
            futures = [engine.write(small, tmp_path / f"{i}") for i in range(50)]
            errors = [future.exception(PATIENCE) for future in futures]
        for error in errors:
            assert isinstance(error, OSError) and error.errno == errno.EMFILE
        engine.write(small, tmp_path / "file").result()


# What is no file


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def is_no_file(error: object) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESPIPE


def is_nobody_there(error: object) -> bool:
    """What the kernel says of a pipe that nobody reads, and of a socket."""
    return isinstance(error, OSError) and error.errno in (errno.ESPIPE, errno.ENXIO)


def test_a_pipe_is_refused_at_once(engine: io.AsyncIO, pipe: Path) -> None:
    tensor = payload(10)
    for begin in (engine.read, engine.write):
        error = begin(tensor, pipe).exception(PATIENCE)
        assert is_nobody_there(error) and f"of {pipe} failed" in str(error), error
    for mode in ("read", "write", "update"):
        with pytest.raises(OSError, match=f"opening {pipe} failed") as caught:
            io.File(str(pipe), mode)
        assert is_nobody_there(caught.value), (mode, caught.value)
    with open(pipe, "rb+", buffering=0):  # both ends
        for begin in (engine.read, engine.write):
            error = begin(tensor, pipe).exception(PATIENCE)
            assert is_no_file(error), error


def test_a_pipe_with_both_ends_is_refused(engine: io.AsyncIO) -> None:
    for end, begin in zip(os.pipe(), (engine.read, engine.write), strict=True):
        error = begin(payload(10), f"/proc/self/fd/{end}").exception(PATIENCE)
        assert is_no_file(error), error
        os.close(end)


def test_a_socket_is_refused_at_once(engine: io.AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # a name has at most 107 bytes
        listener.listen()
        for begin in (engine.read, engine.write):
            error = begin(payload(10), path).exception(PATIENCE)
            assert is_nobody_there(error), error
        with pytest.raises(OSError, match="socket") as caught:
            io.File(str(path), "read")
        assert is_nobody_there(caught.value), caught.value


def test_a_file_blocks_as_any_other(tmp_path: Path) -> None:
    """Opening does not wait for anybody, and nothing of how that is done is left."""
    flags = {}
    for mode in ("write", "update", "read"):
        file = io.File(str(tmp_path / "file"), mode)
        text = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text()
        flags[mode] = int(dict(line.split(":", 1) for line in text.splitlines())["flags"], 8)
    assert not any(flag & os.O_NONBLOCK for flag in flags.values())
    assert all(flag & os.O_CLOEXEC for flag in flags.values())


# Signals


def masks(field: str) -> dict[str, int]:
    """Return a set of signals of each thread of this process, by its number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            text = (task / "status").read_text()
            status = dict(line.split(":", 1) for line in text.splitlines())
            if not status["Name"].strip().startswith("iou-"):  # the kernel's own
                found[task.name] = int(status[field], 16)
    return found


def settled_masks() -> dict[str, int]:
    """Return which signals each thread blocks, once every thread has set its own mask.

    Until then it blocks all, with those of the C library that no caller can block.
    """
    while True:
        found = masks("SigBlk")
        if not any(mask >> SIGSETXID - 1 & 1 for mask in found.values()):
            return found


def test_threads_block_the_signals_of_others_and_not_their_own(
    backend: str, tmp_path: Path
) -> None:
    before = settled_masks()
    with io.AsyncIO(threads=2, backend=backend) as engine:
        engine.write(payload(BLOCK + 1)[1:], tmp_path / "file").result()
        after = settled_masks()
    new = {task: mask for task, mask in after.items() if task not in before}
    assert len(new) >= 2
    for mask in new.values():
        blocked = {number for number in signal.Signals if mask >> (number - 1) & 1}
        assert not blocked & {
            signal.SIGSEGV,
            signal.SIGBUS,
            signal.SIGFPE,
            signal.SIGILL,
            signal.SIGABRT,
        }
        assert blocked >= {signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}
    here = str(threading.get_native_id())
    assert after[here] == before[here]


@pytest.mark.parametrize("what", ["engine", "pool", "handle"])
def test_a_signal_handler_may_do_the_same(tmp_path: Path, what: str) -> None:
    native()  # if it has to be compiled, then before the clock runs
    done = warm_python.run(CHILD, f"alarms-{what}", tmp_path, "threads", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# Forks


def test_a_pool_works_in_a_child_whatever_its_parent_was_at() -> None:
    pool = io.PinnedPool()
    tensor = pool.empty(1000)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            entered.set()
            leave.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(PATIENCE)
    children = []
    for use in (pool.stats, pool.trim, lambda: pool.take(10)):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(20)  # ends a child that hangs
            try:
                use()
                os._exit(0 if pool.stats()["in_use"] <= 4096 else 1)
            finally:
                os._exit(2)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    leave.set()
    holder.join()
    assert ends == [0, 0, 0]
    assert pool.stats()["buffers"] == 1
    del tensor
