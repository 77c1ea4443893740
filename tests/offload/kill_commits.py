"""Kill processes that commit, at every step of it and at random moments, and look what is there.

    python kill_commits.py FOLDER

Prints how many steps a commit has, and how often processes were killed.
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch._dynamo  # which each child would import anew
import torch.distributed as dist
from killing import Work, fork, kill_at_every_step, kill_at_random
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer

RANDOM_KILLS, KILLS_OF_TWO = 30, 12
LAST = 1 << 20  # a step that nobody reaches
CALLS = ("fsync", "replace")


def params() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(n, generator=generator)) for n in (70_000, 500, 90_000)]


def opened(folder: Path, resume: bool = True) -> OffloadOptimizer:
    """Return an optimizer whose first parameters have their state in memory."""
    return OffloadOptimizer(
        params(),
        device="nvme",
        nvme_path=folder,
        nvme_fraction=0.6,
        memory_budget="8MiB",
        durable=True,
        resume=resume,
        threads=1,
    )


def train(optimizer: OffloadOptimizer, last: int, rank: int = 0) -> Iterator[int]:
    """Take steps behind the one that was committed, up to the last."""
    first = 1 if optimizer.committed is None else optimizer.committed["step"] + 1
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(2 * step + rank)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        yield step


def digest(optimizer: OffloadOptimizer) -> str:
    """Return what tells weights and state apart from any others."""
    optimizer.synchronize()
    text = hashlib.sha256()
    for param in optimizer.param_groups[0]["params"]:
        for value in (param.detach(), *optimizer.state[param].values()):
            text.update(value.numpy().tobytes())
    return text.hexdigest()


def write_digests(path: Path, rank: int) -> None:
    """Write down what weights and state are to be after each of the first steps."""
    path.with_suffix(f".{rank}").mkdir(parents=True)
    lines = []
    with opened(path.with_suffix(f".{rank}"), resume=False) as optimizer:
        lines = [digest(optimizer) for _ in train(optimizer, 60, rank)]
    path.with_suffix(f".txt{rank}").write_text("\n".join(lines))


def in_child(work: Work) -> None:
    """Do something in a process of its own, as threads are not to be forked."""
    assert os.waitpid(fork(partial(_told, work)), 0)[1] == 0


def _told(work: Work) -> None:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        raise


def commit_again_and_again(folder: Path, last: int = LAST) -> None:
    with opened(folder) as optimizer:
        for step in train(optimizer, last):
            optimizer.commit(step=step)


def begin(folder: Path) -> None:
    """Have a commit there, of step 1, and some work after it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    in_child(partial(commit_again_and_again, folder, 1))


def look_after(folder: Path, digests: Path, when: str) -> None:
    in_child(partial(_look_after, folder, digests, when))


def _look_after(folder: Path, digests: Path, when: str, rank: int = 0) -> None:
    """The last commit is there, whole, and training goes on from it."""
    with opened(folder) as optimizer:
        if optimizer.committed is None:
            assert when.startswith("kill"), when
            return
        expected = digests.with_suffix(f".txt{rank}").read_text().split()
        step = optimizer.committed["step"]
        if step + 2 > len(expected):
            return
        assert digest(optimizer) == expected[step - 1], (when, step)
        for later in train(optimizer, step + 2, rank):
            assert digest(optimizer) == expected[later - 1], (when, step, later)


def join(group: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", f"file://{group}", timedelta(seconds=30), rank=rank, world_size=2
    )


def commit_together(rank: int, folder: Path, group: Path, begun: int) -> None:
    """Commit with another process for ever."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the one says that is left
    join(group, rank)
    optimizer = opened(folder)
    os.write(begun, b"x")
    for step in train(optimizer, LAST, rank):
        optimizer.commit(step=step)


def look_after_two(rank: int, folder: Path, digests: Path, group: Path, when: str) -> None:
    join(group, rank)
    _look_after(folder, digests, when, rank)
    found: list[object] = [None, None]
    with opened(folder) as optimizer:
        dist.all_gather_object(found, optimizer.committed)
    assert found[0] == found[1], (when, found)


def kill_some_of_two(folder: Path, digests: Path) -> None:
    chance = random.Random(1)
    home = folder / "of two"
    home.mkdir()
    for i in range(KILLS_OF_TWO):
        here, there = os.pipe()
        children = [
            fork(partial(commit_together, rank, home, folder / f"group{i}", there))
            for rank in (0, 1)
        ]
        for _ in children:
            os.read(here, 1)
        time.sleep(chance.random() * 0.2)
        for rank in chance.choice(([0], [1], [0, 1])):
            os.kill(children[rank], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)  # the other one ends too, by an error
        os.close(here)
        os.close(there)
        look = partial(
            look_after_two,
            folder=home,
            digests=digests,
            group=folder / f"look{i}",
            when=f"kill {i}",
        )
        for child in [fork(partial(_told, partial(look, rank))) for rank in (0, 1)]:
            assert os.waitpid(child, 0)[1] == 0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    digests = folder / "digests"
    for rank in (0, 1):
        in_child(partial(write_digests, digests, rank))
    path = folder / "alone"
    look = partial(look_after, path, digests)
    steps = kill_at_every_step(
        partial(begin, path), partial(commit_again_and_again, path, 3), CALLS, look
    )
    begin(path)
    kill_at_random(partial(commit_again_and_again, path), RANDOM_KILLS, 0.4, look)
    kill_some_of_two(folder, digests)
    print(steps, RANDOM_KILLS, KILLS_OF_TWO)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
