"""Processes that end or fork with I/O under way: python aio_child.py CASE FOLDER BACKEND ..."""

import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from aio_cases import payload
from held_memory import HeldMemory

from deepspeed_ext import io
from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.handle import aio_handle

FILES, NBYTES, HELD = 8, 3_000_001, 3 << 20
parent = os.getpid()
kept: list[object] = []  # what is still there when Python ends


def ends_with_writes_pending(backend: str, folder: Path) -> None:
    """Begin many writes, one more request that fails, and ask for none of them."""
    engine = io.AsyncIO(block_size=65536, queue_depth=2, backend=backend)
    for i in range(FILES):
        engine.write(payload(NBYTES, seed=i), folder / f"{i}")
    engine.read(torch.zeros(1), folder / "missing" / "file")
    strided = torch.stack([payload(NBYTES, seed=FILES), payload(NBYTES)]).t()[:, 0]
    engine.write(strided, folder / f"{FILES}")
    kept.append([engine, kept])  # a cycle, too


def forks(backend: str, folder: Path) -> None:
    """Fork with a write under way; the child may do nothing with it, and ends like any other."""
    engine = io.AsyncIO(block_size=65536, queue_depth=2, backend=backend)
    content = bytes(payload(HELD).numpy())
    with HeldMemory(HELD) as held:
        future = engine.write(held.tensor(), folder / "parent")
        held.wait_until_touched()
        began = time.monotonic()
        if os.fork() == 0:
            in_child(engine, future, folder)
            return  # through all that Python does at its end, with everything still referenced
        _, status = os.wait()
        assert status == 0, status
        assert time.monotonic() - began < 20
        if os.fork() == 0:
            del engine, future
            gc.collect()
            os._exit(0)
        _, status = os.wait()
        assert status == 0, status
        assert not future.done()
        held.release(content)
        future.result()
    engine.write(payload(5), folder / "after").result()
    assert (folder / "parent").read_bytes() == content
    print(backend, "done")


def in_child(engine: io.AsyncIO, future: io.Future, folder: Path) -> None:
    here = f"in process {os.getpid()}, expected process {os.getppid()}"
    uses = {
        "read": lambda: engine.read(torch.zeros(1), folder / "parent"),
        "write": lambda: engine.write(torch.zeros(1), folder / "parent"),
        "wait": engine.wait,
        "stats": engine.stats,
        "result": future.result,
        "exception": future.exception,
        "done": future.done,
    }
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            assert here in str(error), (name, str(error))
        else:
            raise AssertionError(f"{name} in the child was no error")
    engine.close()  # nothing to do here
    with io.AsyncIO(backend=engine.backend) as own:
        own.write(payload(7), folder / "child").result()
    kept.append((engine, future))


class SlowToGo:
    """Takes its time when Python has begun to end, as large modules do."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(0.2)


def ends_with_daemons_waiting(backend: str, folder: Path) -> None:
    """End Python while daemon threads wait for what never ends, in each way there is."""
    engine = io.AsyncIO(backend=backend)
    engine._at_end.atexit = False  # it would wait for them
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    held = HeldMemory(HELD)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    future = engine.write(held.tensor(), folder / "file")
    held.wait_until_touched()
    waits: list[Callable[[], object]] = [future.result, future.exception, engine.wait]
    for wait in waits * 3:
        threading.Thread(target=wait, daemon=True).start()
    kept.append(SlowToGo())


def alarms_in(use: Callable[[], object], rounds: int = 1000) -> None:
    """Call a function again and again, and also in a signal handler in the middle of that."""
    native()  # before the clock runs
    faulthandler.dump_traceback_later(80, exit=True)  # what takes longer hangs
    alarms = 0

    def handle(number: int, frame: object) -> None:
        nonlocal alarms
        alarms += 1
        for _ in range(3):
            use()
        if not over:
            signal.setitimer(signal.ITIMER_REAL, 0.0003)

    over = False
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    try:
        for _ in range(rounds):
            use()
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert alarms > 10, alarms


def writes_in_alarms(backend: str, folder: Path) -> None:
    numbers = itertools.count()
    with io.AsyncIO(backend=backend) as engine:

        def write() -> None:
            number = next(numbers) % 100
            engine.write(torch.tensor(number), folder / f"{number}").result()

        alarms_in(write)
        assert engine.stats()["completed"] == next(numbers)
    for number in range(100):
        assert (folder / f"{number}").read_bytes() == number.to_bytes(8, sys.byteorder)


def takes_in_alarms(backend: str, folder: Path) -> None:
    pool = io.PinnedPool(1 << 20)
    sizes = itertools.cycle([1000, 5000, 9000])
    out: list[torch.Tensor] = []

    def take() -> None:
        out.append(pool.empty(next(sizes), torch.uint8))
        if len(out) > 5:
            out.pop(0)

    alarms_in(take)
    out.clear()
    pool.trim()
    stats = pool.stats()
    assert (stats["buffers"], stats["in_use"], stats["pinned_bytes"]) == (0, 0, 0), stats


def handles_in_alarms(backend: str, folder: Path) -> None:
    handle = aio_handle()
    numbers = itertools.count()
    ended = []

    def write() -> None:
        number = next(numbers)
        handle.async_pwrite(torch.tensor(number), folder / f"{number % 100}")
        ended.append(handle.wait())

    alarms_in(write)
    assert sum(ended) + handle.wait() == next(numbers)


CASES = {
    "forks": forks,
    "daemons": ends_with_daemons_waiting,
    "alarms-engine": writes_in_alarms,
    "alarms-pool": takes_in_alarms,
    "alarms-handle": handles_in_alarms,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # of fork
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    case, where, *backends = sys.argv[1:]
    for name in backends:
        (Path(where) / name).mkdir()
        run = CASES.get(case, ends_with_writes_pending)
        run(name, Path(where) / name)
        if os.getpid() != parent:
            break
    if case == "raise":
        raise KeyError("the child's own error")
