"""Transfers through the ring with its thread and a real engine; the device is ordinary memory."""

import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from aio_cases import bytes_of, payload
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine import bounce
from deepspeed_ext.io.engine.bounce import BounceTransfers
from deepspeed_ext.io.engine.future import Future
from deepspeed_ext.io.engine.ring import Ring, RingJob

RING, PIECE = 1 << 18, 1 << 16
SIZES = [0, 1, 4095, PIECE, 5 * PIECE + 3, 10 * RING + 7]


class Mark:
    """A point that may be held back."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate

    def query(self) -> bool:
        return self.gate is None or self.gate.is_set()


class Copies:
    """A device that is ordinary memory and copies at once; `gate` holds back what starts."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate

    def mark(self, tensor: Tensor) -> Mark:
        return Mark(self.gate)

    def copy(self, destination: Tensor, source: Tensor) -> Mark:
        destination.copy_(source)
        return Mark()


def transfers(engine: Any, gate: threading.Event | None = None) -> BounceTransfers:
    return BounceTransfers(
        *(engine.submit, Copies(gate), engine.register, engine.unregister, RING, PIECE)
    )


@contextlib.contextmanager
def opened(backend: str = "auto") -> Iterator[tuple[BounceTransfers, Any]]:
    engine = native().Engine(8192, 16, 1, backend)
    bounced = transfers(engine)
    yield bounced, engine
    bounced.close()
    engine.close()


def end(job: RingJob) -> None:
    assert job.wait(60)
    job.check()


def file_limit(nbytes: int) -> None:
    """Refuse files that are longer, in this process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


@pytest.mark.parametrize("offset", [0, 1, 4096, PIECE + 100])
@pytest.mark.parametrize("nbytes", SIZES)
def test_round_trips(backend: str, tmp_path: Path, nbytes: int, offset: int) -> None:
    path, tensor, got = str(tmp_path / "file"), payload(nbytes), torch.zeros(nbytes).byte()
    with opened(backend) as (bounced, engine):
        end(bounced.write(tensor, path, offset))
        assert os.path.getsize(path) == (offset + nbytes if nbytes else 0)
        end(bounced.read(got, path, offset))
        assert torch.equal(got, tensor)
        stats = engine.stats()
        assert stats["copied_bytes"] == 0  # no address is unaligned where the file is not
        if backend == "io_uring":  # all but what lies across two of the kernel's buffers
            assert stats["fixed_bytes"] >= 0.8 * stats["direct_bytes"]


@pytest.mark.parametrize("target", ["path", "bytes", "File"])
def test_neighbours_stay_and_truncate_cuts(tmp_path: Path, target: str) -> None:
    path, before, tensor = tmp_path / "file", payload(8 * PIECE), payload(3 * PIECE + 5, seed=1)
    path.write_bytes(bytes_of(before))
    kinds = {"path": str, "bytes": os.fsencode, "File": lambda path: native().File(path, "update")}
    to = kinds[target](str(path))
    with opened() as (bounced, _):
        end(bounced.write(tensor, to, 100))
        content = bytearray(bytes_of(before))
        content[100 : 100 + tensor.numel()] = bytes_of(tensor)
        assert path.read_bytes() == content
        end(bounced.write(tensor, to, 0, truncate=True))
        assert path.read_bytes() == bytes_of(tensor)
        end(bounced.write(tensor[:0], to, 7, truncate=True))
        assert path.read_bytes() == bytes_of(tensor[:7])


def test_many_threads(tmp_path: Path) -> None:
    def work(index: int) -> None:
        for size in (5, 3 * PIECE + index, RING + index):
            tensor, path = payload(size, seed=index), str(tmp_path / f"{index}")
            end(bounced.write(tensor, path, index, truncate=True))
            got = torch.zeros_like(tensor)
            end(bounced.read(got, path, index))
            assert torch.equal(got, tensor)

    with opened() as (bounced, _), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_many_in_flight(tmp_path: Path) -> None:
    tensors = [payload(size % (2 * PIECE), seed=size) for size in range(0, 3_000_000, 4999)]
    with opened() as (bounced, _):
        jobs = [
            bounced.write(t, str(tmp_path / f"{i}"), 0, truncate=True)
            for i, t in enumerate(tensors)
        ]
        for job in jobs:
            end(job)
    for i, tensor in enumerate(tensors):
        assert (tmp_path / f"{i}").read_bytes() == bytes_of(tensor)


@pytest.mark.parametrize("nbytes", [1000, 4 * PIECE])
def test_failures_name_the_file_and_disturb_nobody(tmp_path: Path, nbytes: int) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes_of(payload(nbytes - 1)))
    cases = [
        (False, str(short), errno.ENODATA, "the file ends at"),
        (False, str(tmp_path / "missing"), errno.ENOENT, "No such file"),
        (True, str(tmp_path / "missing" / "file"), errno.ENOENT, "No such file"),
        (True, str(tmp_path), errno.EISDIR, "Is a directory"),
    ]
    with opened() as (bounced, _):
        jobs = []
        for write, path, _, _ in cases:
            good = bounced.write(payload(nbytes), f"{tmp_path}/good", 0, truncate=True)
            tensor = payload(nbytes)
            bad = bounced.write(tensor, path, 0) if write else bounced.read(tensor, path, 0)
            jobs.append((good, bad))
        for (_, path, code, text), (good, bad) in zip(cases, jobs, strict=True):
            end(good)
            assert bad.wait(60)
            with pytest.raises(OSError, match=text) as caught:
                bad.check()
            assert caught.value.errno == code
            assert path in str(caught.value) and "bytes are free there" in str(caught.value)
    assert (tmp_path / "good").read_bytes() == bytes_of(payload(nbytes))


def in_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that can import this file."""
    program = "import sys\nfrom test_bounce import *\n" + code
    return warm_python.run("-c", program, *arguments, cwd=Path(__file__).parent)


def test_a_file_that_may_grow_no_further(tmp_path: Path) -> None:
    code = """
file_limit(3 * PIECE)
with opened() as (bounced, _):
    bad = bounced.write(payload(10 * PIECE), sys.argv[1], 0)
    good = bounced.write(payload(2 * PIECE), sys.argv[1] + "2", 0)
    end(good)
    assert bad.wait(60)
    try:
        bad.check()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        print(error)
"""
    done = in_child(code, tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert f"write of {PIECE} bytes at offset {3 * PIECE} of {tmp_path}/file failed" in done.stdout
    assert (tmp_path / "file2").read_bytes() == bytes_of(payload(2 * PIECE))


@pytest.mark.parametrize("ending", ["return", "sys.exit(3)", "raise KeyboardInterrupt", "del"])
def test_what_is_under_way_when_python_ends_arrives(tmp_path: Path, ending: str) -> None:
    code = """
engine = native().Engine(8192, 16, 1, "auto")
bounced = transfers(engine)
job = bounced.write(payload(40 * PIECE), sys.argv[1], 0, truncate=True)
"""
    code += {"return": "", "del": "del engine, bounced, job; gc.collect()"}.get(ending, ending)
    done = in_child(code, tmp_path / "file")
    assert done.returncode == {"return": 0, "del": 0, "sys.exit(3)": 3}.get(ending, -2), done.stderr
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(40 * PIECE))


def test_close_drains_and_then_refuses(tmp_path: Path) -> None:
    engine = native().Engine(8192, 16, 1, "auto")
    bounced = transfers(engine)
    job = bounced.write(payload(20 * PIECE), str(tmp_path / "file"), 0, truncate=True)
    bounced.close()
    assert job.done()
    job.check()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(20 * PIECE))
    with pytest.raises(RuntimeError, match="engine is closed, expected an open one"):
        bounced.read(payload(5), "file", 0)
    bounced.close()


def test_a_job_waits_for_its_tensor_and_a_wait_for_the_job(tmp_path: Path) -> None:
    gate = threading.Event()
    bounced = transfers(native().Engine(8192, 16, 1, "auto"), gate)
    tensor = payload(100)
    job = bounced.write(tensor, str(tmp_path / "file"), 0, truncate=True)
    future = Future(job, tensor)
    assert not job.wait(0.01) and not job.done()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert not (tmp_path / "file").exists()
    tensor.fill_(9)
    gate.set()
    assert future.result(60) is tensor
    assert (tmp_path / "file").read_bytes() == bytes([9] * 100)
    bounced.close()


def test_a_forked_child_has_no_transfers(tmp_path: Path) -> None:
    code = """
gate = threading.Event()
bounced = transfers(native().Engine(8192, 16, 1, "auto"), gate)
job = bounced.write(payload(9), sys.argv[1], 0, truncate=True)
if (child := os.fork()) == 0:
    for use in (lambda: bounced.read(payload(9), sys.argv[1], 0), lambda: job.wait(10)):
        try:
            use()
        except RuntimeError as error:
            assert "which" in str(error)
        else:
            os._exit(1)
    bounced.close()
    del bounced, job
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
gate.set()
end(job)
"""
    done = in_child(code, tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(9))


def test_the_thread_ends_and_everything_goes(tmp_path: Path) -> None:
    engine = native().Engine(8192, 16, 1, "auto")
    bounced = transfers(engine)
    path = str(tmp_path / "file")
    for _ in range(3):
        end(bounced.write(payload(5), path, 0, truncate=True))
        threads = [t for t in threading.enumerate() if t.name == "deepspeed_ext-transfers"]
        assert len(threads) <= 1
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert bounced._ring is not None
    gone = weakref.ref(bounced._ring._memory)
    del bounced
    gc.collect()
    assert gone() is None


def test_an_owner_that_is_dropped_ends_after_its_transfers(tmp_path: Path) -> None:
    class Owner:
        pass

    def end(bounced: BounceTransfers, engine: Any, job: list[RingJob]) -> None:
        bounced.close()  # in the thread of the transfers
        engine.close()
        ended.append((job[0].done(), threading.current_thread().name))

    gate, ended = threading.Event(), []
    engine, owner, job = native().Engine(8192, 16, 1, "auto"), Owner(), []
    bounced = transfers(engine, gate)
    weakref.finalize(owner, end, bounced, engine, job)
    path = tmp_path / "file"
    job.append(bounced.write(payload(5 * PIECE), str(path), 0, owner, truncate=True))
    del owner
    gc.collect()
    assert not ended
    thread = bounced._thread
    gate.set()
    assert thread is not None
    thread.join(60)
    assert ended == [(True, "deepspeed_ext-transfers")]
    job[0].check()
    assert path.read_bytes() == bytes_of(payload(5 * PIECE))


def test_a_fault_of_the_thread_fails_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(ring: Ring) -> bool:
        raise ZeroDivisionError

    with opened() as (bounced, _):
        monkeypatch.setattr(Ring, "step", fault)
        job = bounced.write(payload(5), str(tmp_path / "file"), 0, truncate=True)
        assert job.wait(60)
        with pytest.raises(ZeroDivisionError):
            job.check()
        with pytest.raises(RuntimeError, match="closed"):
            bounced.write(payload(5), str(tmp_path / "file"), 0, truncate=True)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    ("ring", "piece", "text"),
    [
        (RING, 0, "piece_bytes is 0, expected a multiple of 4096, at least 4096"),
        (RING, 4097, "piece_bytes is 4097, expected a multiple of 4096"),
        (PIECE, RING, f"ring_bytes is {PIECE}, expected a multiple of 4096, at least {RING}"),
    ],
)
def test_sizes_are_checked(ring: int, piece: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        bounce.BounceTransfers(lambda *_: Future(None, None), Copies(), None, None, ring, piece)
