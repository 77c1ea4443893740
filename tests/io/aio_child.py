"""Processes that end or fork with I/O under way: python aio_child.py CASE FOLDER BACKEND ..."""

import gc
import logging
import os
import sys
import time
from pathlib import Path

import torch
from aio_cases import payload
from held_memory import HeldMemory

from deepspeed_ext import io

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


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    case, where, *backends = sys.argv[1:]
    for name in backends:
        (Path(where) / name).mkdir()
        run = forks if case == "forks" else ends_with_writes_pending
        run(name, Path(where) / name)
        if os.getpid() != parent:
            break
    if case == "raise":
        raise KeyError("the child's own error")
