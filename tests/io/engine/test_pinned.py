"""Pinned buffers and the pool: exact, locked where that is allowed, and gone when nobody looks."""

import contextlib
import gc
import itertools
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import warm_python

from deepspeed_ext.io.engine import pinned
from deepspeed_ext.io.engine.pinned import PinnedBuffer, PinnedPool

PAGE = os.sysconf("SC_PAGESIZE")
MIB = 1 << 20
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# What an ordinary user may do: no rights, and 8 MiB of locked memory.
ORDINARY = """
import os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
from test_pinned import *
PinnedBuffer(1)  # loads what an ordinary user may not be able to read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


def in_child(code: str, before: str = "from test_pinned import *\n") -> str:
    """Run code in a fresh process and return what it prints."""
    quiet = "import sys, warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n"  # of fork
    done = warm_python.run("-c", quiet + before + code, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def locked_bytes(of: str = "VmLck") -> int:
    """Return what the kernel says this process has locked."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(of))) * 1024


def mapped(address: int) -> bool:
    """Return whether there is memory at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MIB + 1])
def test_a_buffer_is_exact_and_locked(nbytes: int) -> None:
    before = locked_bytes()
    buffer = PinnedBuffer(nbytes)
    assert buffer.pinned and buffer.why_not is None
    if not buffer.cuda:
        assert locked_bytes() - before == -(-nbytes // PAGE) * PAGE
    assert buffer.address % PAGE == 0
    tensor = buffer.tensor()
    assert tensor.shape == (nbytes,) and tensor.dtype is torch.uint8
    assert tensor.data_ptr() == buffer.address
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * nbytes
    del buffer, tensor
    assert locked_bytes() == before


def test_an_empty_buffer() -> None:
    buffer = PinnedBuffer(0)
    assert buffer.tensor().shape == (0,)
    assert buffer.tensor(torch.float64, (3, 0)).shape == (3, 0)
    assert buffer.why_not is None


def test_tensors_of_any_dtype_and_shape_share_the_memory() -> None:
    buffer = PinnedBuffer(96)
    buffer.tensor().copy_(torch.arange(96, dtype=torch.uint8))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool, torch.int64):
        assert buffer.tensor(dtype).shape == (96 // dtype.itemsize,)
    assert buffer.tensor(torch.int16, (2, 3)).shape == (2, 3)
    assert buffer.tensor(torch.int32, ()).item() == 0x03020100
    buffer.tensor(torch.int32, (4,))[0] = -1
    assert buffer.tensor()[:5].tolist() == [255, 255, 255, 255, 4]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PinnedBuffer(-1), "PinnedBuffer: nbytes is -1, expected 0 or more"),
        (
            lambda: PinnedBuffer(7).tensor(torch.float32),
            "PinnedBuffer: nbytes is 7, expected a multiple of 4 for torch.float32; give a shape",
        ),
        (
            lambda: PinnedBuffer(7).tensor(torch.float32, (2, 1)),
            r"PinnedBuffer: shape is \[2, 1\] of torch.float32, expected at most 7 bytes",
        ),
        (lambda: PinnedBuffer(7).tensor(shape=(-1,)), r"shape is \[-1\] of torch.uint8"),
        (lambda: PinnedPool(-1), "PinnedPool: budget is -1, expected 0 or more, or None"),
        (lambda: PinnedPool().take(-1), "PinnedPool: nbytes is -1, expected 0 or more"),
        (lambda: PinnedPool().empty((2, -1)), r"PinnedPool: shape is \[2, -1\], expected dim"),
    ],
)
def test_bad_arguments(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_memory_goes_with_its_last_user(order: tuple[int, ...]) -> None:
    buffer = PinnedBuffer(5 * MIB)
    address, released = buffer.address, []
    buffer._at_release(lambda: released.append(mapped(address)))
    users: list[object] = [
        buffer,
        buffer.tensor(torch.float32),
        buffer.tensor()[100:200].view(2, 50),
    ]
    del buffer
    for last in order:
        assert not released and mapped(address)
        users[last] = None
    assert released == [True]  # the memory was still there, and now
    assert not mapped(address)


def test_release_callbacks_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    called = []
    buffer = PinnedBuffer(10)
    buffer._at_release(lambda: called.append(1))
    buffer._at_release(lambda: 1 / 0)
    buffer._at_release(lambda: called.append(2))
    del buffer
    assert called == [1, 2]
    assert "ZeroDivisionError" in caplog.text


def test_a_forked_child_releases_nothing() -> None:
    code = """
from pathlib import Path
import tempfile
with tempfile.TemporaryDirectory() as folder:
    pool = PinnedPool(MIB)
    kept, lent = pool.take(PAGE), pool.take(2 * PAGE)
    buffer = PinnedBuffer(10)
    for each in (buffer, lent):
        each._at_release(lambda: open(f"{folder}/{os.getpid()}", "a").write("x"))
    del kept
    assert pool.stats()["pinned_bytes"] == 3 * PAGE
    if (child := os.fork()) == 0:
        del buffer, lent, each
        gc.collect()
        stats = pool.stats() if pool.take(100) else {}
        os._exit(os.path.exists(f"{folder}/{os.getpid()}") + 2 * (stats["pinned_bytes"] != PAGE))
    assert os.waitpid(child, 0)[1] == 0
    del buffer, lent, each
    assert Path(f"{folder}/{os.getpid()}").read_text() == "xx"
"""
    in_child(code)


def test_an_ordinary_users_limit_is_no_error() -> None:
    code = """
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
small, large = PinnedBuffer(MIB), PinnedBuffer(64 * MIB)
assert small.pinned and small.why_not is None
assert not large.pinned and not large.cuda
assert large.why_not == "mlock: Cannot allocate memory; see ulimit -l", large.why_not
large.tensor().fill_(1)
print(repr(small), repr(large))
pool = PinnedPool()
parts = [pool.take(4 * MIB), pool.take(3 * MIB), pool.take(MIB)]
assert [part.pinned for part in parts] == [True, True, False], parts
assert pool.stats() == {
    "pinned_bytes": 7 * MIB, "peak": 7 * MIB, "in_use": 7 * MIB, "pageable": 1, "buffers": 3
}
del parts
assert pool.take(6 * MIB).pinned  # what was kept made room
assert pool.stats()["pinned_bytes"] == 6 * MIB
"""
    lines = in_child(code, ORDINARY).splitlines()
    because = "are pageable: mlock: Cannot allocate memory; see ulimit -l"
    assert lines[0] == f"deepspeed_ext PinnedBuffer: {64 * MIB} bytes {because}"
    assert lines[1] == f"PinnedBuffer({MIB}, locked) PinnedBuffer({64 * MIB}, pageable)"


def test_a_refusal_is_silent_by_default() -> None:
    assert in_child("PinnedBuffer(64 * MIB)", ORDINARY) == ""


def test_nothing_makes_a_cuda_context() -> None:
    code = """
import deepspeed_ext.io.engine.cuda, deepspeed_ext.io.engine.handle
buffer = PinnedBuffer(MIB)
PinnedPool().empty((5, 5))
buffer.tensor().fill_(1)
assert not torch.cuda.is_initialized() and not buffer.cuda
"""
    in_child(code)


class Cudart:
    """A CUDA runtime that notes what it is asked for."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, mapped(address)))
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def pretend_cuda(patch: pytest.MonkeyPatch, code: int = 0) -> Cudart:
    cudart = Cudart(code)
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "device_count", lambda: 8)
    patch.setattr(pinned, "has_cuda_context", lambda device: device == 3)
    patch.setattr(torch.cuda, "set_device", lambda device: cudart.calls.append(("device", device)))
    patch.setattr(torch.cuda, "device", contextlib.nullcontext)
    patch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


def test_cuda_knows_the_pages_exactly_as_long_as_they_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = pretend_cuda(monkeypatch)
    buffer = PinnedBuffer(PAGE + 1)
    assert buffer.pinned and buffer.cuda and buffer.why_not is None
    address, tensor = buffer.address, buffer.tensor()
    del buffer
    registered = [("device", 3), ("register", address, 2 * PAGE, 1)]
    assert cudart.calls == registered
    del tensor
    assert cudart.calls == [*registered, ("unregister", address, True)]


def test_a_pool_keeps_what_cuda_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = pretend_cuda(monkeypatch)
    pool = PinnedPool(4 * PAGE)
    for _ in range(5):
        assert pool.take(2 * PAGE - 1).cuda
    assert [call[0] for call in cudart.calls] == ["device", "register"]
    pool.trim()
    assert [call[0] for call in cudart.calls] == ["device", "register", "unregister"]


def test_cuda_may_refuse(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cudart = pretend_cuda(monkeypatch, code=2)
    buffer = PinnedBuffer(PAGE)
    assert buffer.pinned and not buffer.cuda
    assert buffer.why_not == "cudaHostRegister: error 2"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    del buffer
    assert [call[0] for call in cudart.calls] == ["device", "register"]


def test_a_pool_stays_within_its_budget() -> None:
    pool = PinnedPool(10 * PAGE)
    before = locked_bytes()
    first, second = pool.take(6 * PAGE), pool.take(4 * PAGE)
    third = pool.take(1)
    assert (first.pinned, second.pinned, third.pinned) == (True, True, False)
    assert third.why_not is None
    assert pool.stats() == {
        "pinned_bytes": 10 * PAGE,
        "peak": 10 * PAGE,
        "in_use": 10 * PAGE,
        "pageable": 1,
        "buffers": 3,
    }
    tensor = second.tensor()
    del first, second, third
    assert pool.stats()["in_use"] == 4 * PAGE and pool.stats()["buffers"] == 1
    assert pool.stats()["pinned_bytes"] == 10 * PAGE  # kept
    assert torch.cuda.is_initialized() or locked_bytes() - before == 10 * PAGE
    del tensor
    pool.trim()
    assert pool.stats()["pinned_bytes"] == 0 and locked_bytes() == before
    assert pool.stats()["peak"] == 10 * PAGE


def test_memory_is_used_again_for_the_same_number_of_pages() -> None:
    pool = PinnedPool(8 * PAGE)
    address = pool.take(3 * PAGE).address
    assert pool.take(PAGE).address != address
    again = pool.empty((2 * PAGE + 1,), torch.uint8)
    assert again.data_ptr() == address and again.shape == (2 * PAGE + 1,)
    assert pool.stats()["pinned_bytes"] == 4 * PAGE


def test_the_longest_unused_goes_first() -> None:
    pool = PinnedPool(6 * PAGE)
    buffers = [pool.take(pages * PAGE) for pages in (1, 2, 3)]
    for pages in (2, 1, 3):
        buffers[pages - 1] = None
        assert pool.stats()["buffers"] == 3 - [2, 1, 3].index(pages) - 1
    assert [memory.locked_bytes for memory in pool._kept] == [2 * PAGE, PAGE, 3 * PAGE]
    four = pool.take(4 * PAGE)  # 2 and 1 are not enough
    assert four.pinned and not pool._kept
    buffers = [pool.take(PAGE), pool.take(PAGE)]
    address = buffers[1].address
    for index in range(2):
        buffers[index] = None
        pool.stats()
    assert pool.take(PAGE).address == address  # what was used last is used first
    assert pool.stats()["pinned_bytes"] == 6 * PAGE


def test_release_callbacks_come_before_memory_is_lent_anew() -> None:
    pool, called = PinnedPool(PAGE), []
    for index in range(3):
        buffer = pool.take(PAGE)
        buffer._at_release(lambda index=index: called.append(index))
        del buffer
        assert called == list(range(index + 1))


def test_tensors_outlive_their_pool() -> None:
    pool = PinnedPool(MIB)
    tensor = pool.empty((100, 100))
    gone = weakref.ref(pool)
    del pool
    assert gone() is None
    address = tensor.data_ptr()
    tensor.fill_(3)
    del tensor
    assert not mapped(address)


def test_empty_of_a_number_and_of_nothing() -> None:
    pool = PinnedPool()
    assert pool.empty(5).shape == (5,) and pool.empty(()).shape == ()
    assert pool.empty((0, 3), torch.int8).shape == (0, 3)
    assert pool.stats()["pageable"] == 0


def test_threads_and_collections_do_not_confuse_the_books() -> None:
    pool = PinnedPool(64 * PAGE)

    def work(seed: int) -> None:
        choice, held = random.Random(seed), []
        for _ in range(300):
            tensor = pool.empty((choice.randrange(1, 9 * PAGE),), torch.uint8)
            tensor[0] = tensor[-1] = seed
            held.append(tensor)
            if choice.random() < 0.6:
                held.pop(choice.randrange(len(held)))
            if choice.random() < 0.1:
                cycle: list[object] = [held.pop() if held else None]
                cycle.append(cycle)  # only a collection frees it
            assert all(tensor[0] == seed and tensor[-1] == seed for tensor in held)
            assert pool.stats()["pinned_bytes"] <= 64 * PAGE

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    gc.collect()
    stats = pool.stats()
    assert stats["in_use"] == stats["buffers"] == 0
    assert stats["peak"] <= 64 * PAGE and stats["pageable"] > 0
    pool.trim()
    assert pool.stats()["pinned_bytes"] == 0


@needs_cuda
def test_cuda_copies_are_asynchronous_from_the_buffer() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    buffer = PinnedBuffer(64 * MIB)
    assert buffer.cuda and buffer.why_not is None
    tensor = buffer.tensor(torch.float32)
    assert tensor.is_pinned() and tensor[5:].is_pinned()
    tensor.normal_()
    torch.cuda._sleep(200_000_000)
    there = tensor.to("cuda", non_blocking=True)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), tensor)
    address = buffer.address
    del buffer, tensor
    assert not mapped(address)
    assert PinnedBuffer(64 * MIB).tensor().is_pinned()  # perhaps at the same place


@needs_cuda
def test_a_refusal_of_cuda_is_no_error_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    monkeypatch.setattr(pinned, "_PORTABLE", 1 << 20)  # no such flag
    buffer = PinnedBuffer(MIB)
    assert buffer.pinned and not buffer.cuda
    assert buffer.why_not and buffer.why_not.startswith("cudaHostRegister: invalid argument")
    torch.ones(10, device="cuda").sum().item()  # finds no error left behind


@needs_cuda
def test_registered_memory_goes_in_any_thread() -> None:
    torch.zeros(1, device="cuda")
    tensors = [PinnedBuffer(MIB).tensor()]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert PinnedBuffer(MIB).tensor().is_pinned()
