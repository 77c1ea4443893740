"""A program that kills savers, at every step they take and at random moments, and looks after them.

The argument is a folder. It prints at how many steps it killed, and how often at random. It must
not start threads before it forks.
"""

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.zero.checkpoint.storage import Reader, Writer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
SIZE = 300_001  # more than is packed with others
RANDOM_KILLS = 30


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), number), "v": torch.tensor(number), "plain": [number, "x"]}


def save(number: float, path: Path) -> None:
    dcp.save(state(number), storage_writer=Writer(path), no_dist=True)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def counted(deadly: int, function: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    """Return a function that kills the process before or after its n-th call of all such."""

    def step() -> None:
        count[0] += 1
        if count[0] == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*arguments: Any, **named: Any) -> Any:
        step()
        result = function(*arguments, **named)
        step()
        return result

    return call


def save_until(deadly: int, path: Path) -> None:
    """Save the second state; die at a step."""
    count = [0]
    AsyncIO.write = counted(deadly, AsyncIO.write, count)  # type: ignore[method-assign]
    for name in ("fsync", "link", "replace", "unlink"):
        setattr(os, name, counted(deadly, getattr(os, name), count))
    save(2.0, path)


def save_forever(path: Path) -> None:
    while True:
        for number in (1.0, 2.0):
            save(number, path)


def look_after(path: Path, when: str) -> None:
    """One of the states is there, whole."""
    loaded = {"w": torch.empty(SIZE), "v": torch.empty(()), "plain": [0.0, ""]}
    dcp.load(loaded, storage_reader=Reader(path), no_dist=True)
    number = float(loaded["v"])
    assert number in (1.0, 2.0) and loaded["w"].eq(number).all(), when
    assert loaded["plain"] == [number, "x"], when


def main(path: Path) -> None:
    torch.set_num_threads(1)
    save(1.0, path)
    deadly, status = 0, 1
    while status:
        deadly += 1
        save(1.0, path)
        assert len(list(path.iterdir())) == 2, "what was left is removed"
        _, status = os.waitpid(fork(partial(save_until, deadly, path)), 0)
        assert status in (0, signal.SIGKILL), status
        look_after(path, f"step {deadly}")
    chance = random.Random(1)
    for i in range(RANDOM_KILLS):
        child = fork(partial(save_forever, path))
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        look_after(path, f"kill {i}")
    print(deadly - 1, RANDOM_KILLS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
