"""A program that kills savers, at every step they take and at random moments, and looks after them.

The arguments are a folder and the kind of temporary file, "unnamed" or "named". It prints at how
many steps it killed, and how often at random. It must not start threads before it forks.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from state_dict_cases import assert_same, files_in

from deepspeed_ext import io
from deepspeed_ext.io.checkpoint import new_file
from deepspeed_ext.io.checkpoint.state_dict import load, save

MIB = 1 << 20
STATES = [{"w": torch.full((MIB // 2 + 3,), v), "v": torch.tensor(v)} for v in (1.0, 2.0)]


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
    io.AsyncIO.write = counted(deadly, io.AsyncIO.write, count)  # type: ignore[method-assign]
    for name in ("fsync", "fchmod", "link", "replace"):
        setattr(os, name, counted(deadly, getattr(os, name), count))
    save(STATES[1], path)


def save_forever(path: Path) -> None:
    while True:
        for state in STATES:
            save(state, path, durable=False)


def look_after(path: Path, step: str) -> None:
    """Either state is there, whole, and the next save clears what a saver may have left."""
    loaded = load(path)
    assert_same(loaded, STATES[int(loaded["v"]) - 1])
    if files_in(path.parent) != [path.name]:
        left = [name for name in files_in(path.parent) if name != path.name]
        assert len(left) == 1 and left[0].startswith(".saving-"), (step, left)
        save(STATES[0], path)
        assert files_in(path.parent) == [path.name], step


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    path = folder / "model"
    if kind == "named":
        new_file._DESCRIPTORS = "/does/not/exist"
    save(STATES[0], path)
    deadly, status = 0, 1
    while status:
        deadly += 1
        save(STATES[0], path)
        _, status = os.waitpid(fork(partial(save_until, deadly, path)), 0)
        assert status in (0, signal.SIGKILL), status
        look_after(path, f"step {deadly}")
    chance = random.Random(1)
    for i in range(20):
        child = fork(partial(save_forever, path))
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        look_after(path, f"kill {i}")
    print(deadly - 1, 20)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
