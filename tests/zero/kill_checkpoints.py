"""A program that kills savers, at every step they take and at random moments, and looks after them.

The argument is a folder. It prints at how many steps it killed, and how often at random: one that
saves alone, and one of two processes, or both, that save together.
"""

import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which fully_shard imports: once, before there are processes
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from killing import fork, kill_at_every_step, kill_at_random

from deepspeed_ext import zero
from deepspeed_ext.zero.checkpoint.storage import Reader, Writer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
SIZE = 300_001  # more than is packed with others
RANDOM_KILLS = 22
KILLS_OF_TWO = 8


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), number), "v": torch.tensor(number), "plain": [number, "x"]}


def save(number: float, path: Path) -> None:
    dcp.save(state(number), storage_writer=Writer(path), no_dist=True)


def prepare(path: Path) -> None:
    save(1.0, path)
    assert len(list(path.iterdir())) == 2, "what was left is removed"


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


def save_together(rank: int, home: Path, group: Path, first: int, begun: int) -> None:
    """Save a model of two processes again and again; each has the number of the save in it.

    It tells when it has begun, after saves of both kinds: while a group is made for those that do
    not wait, torch waits as long as its store does for who was killed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the one says that is left
    dist.init_process_group(
        "gloo", f"file://{group}", timedelta(seconds=15), rank=rank, world_size=2
    )
    model = zero.shard(nn.Linear(1, SIZE, bias=False), 3, blocks=[])
    for number in range(first, 1 << 20):
        if number == first + 2:
            os.write(begun, b"x")
        nn.init.constant_(model.weight.to_local(), number)  # type: ignore[operator, union-attr]
        zero.save(home, "ab"[number % 2], model, wait=number % 3 == 0, number=number)


def look_after_two(home: Path, least: int) -> int:
    """The latest checkpoint is there, whole; return its number."""
    number: int = zero.inspect(home)["number"]
    loaded = {"model.weight": torch.empty(SIZE, 1)}
    dcp.load(
        loaded, storage_reader=Reader(home / (home / "latest").read_text().strip()), no_dist=True
    )
    assert number >= least and loaded["model.weight"].eq(number).all()
    return number


def kill_some_of_two(folder: Path) -> None:
    chance, number, home = random.Random(1), 0, folder / "of two"
    for i in range(KILLS_OF_TWO):
        here, there = os.pipe()
        arguments = (home, folder / f"group{i}", number + 1, there)
        children = [fork(partial(save_together, rank, *arguments)) for rank in (0, 1)]
        for _ in children:
            os.read(here, 1)
        while not (home / "latest").exists():
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        killed = chance.choice(([0], [1], [0, 1]))
        for rank in killed:
            os.kill(children[rank], signal.SIGKILL)
        for rank, child in enumerate(children):
            status = os.waitpid(child, 0)[1]
            # The other one ends too, by an error.
            assert status == (signal.SIGKILL if rank in killed else 1 << 8), (i, rank, status)
        os.close(here)
        os.close(there)
        number = look_after_two(home, number)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    path = folder / "alone"
    steps = kill_at_every_step(
        partial(prepare, path),
        partial(save, 2.0, path),
        ("fsync", "link", "replace", "unlink"),
        partial(look_after, path),
    )
    kill_at_random(partial(save_forever, path), RANDOM_KILLS, 0.05, partial(look_after, path))
    kill_some_of_two(folder)
    print(steps, RANDOM_KILLS, KILLS_OF_TWO)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
