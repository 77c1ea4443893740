"""A program whose processes end, each in another way, while a save is under way.

The arguments are a folder and ways, or all. For each way two processes save together, the save is
held back until they end, and this program looks after what they leave. It prints the ways that it
has tried.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # which fully_shard imports: once, before there are processes
import torch.distributed as dist
from torch import nn

from deepspeed_ext import zero
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.threads import is_ending
from deepspeed_ext.zero.checkpoint.storage import Writer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
SIZE = 5001
go = threading.Event()  # for what is held back
# Of both processes, by no connection of theirs: one that dies while the other still makes one
# fails the other's call of save, not the save. Each waits for this before it kills itself.
both_have_begun = multiprocessing.get_context("fork").Barrier(2, timeout=60)


def hold_back() -> None:
    """Let no save write before the program ends, or says that it may."""
    write = Writer.write_data
    Writer.write_data = lambda *a: go.wait(60) and write(*a)  # type: ignore[method-assign]
    is_ending()  # registers ours, which waits for the save: what comes after is called before
    threading._register_atexit(go.set)  # type: ignore[attr-defined]


def no_space(rank: int) -> None:
    """Let no file be as long as it has to be, in this process."""

    def full(*_: object) -> NoReturn:
        raise OSError(28, "io.save: there is no space")

    if dist.get_rank() == rank:
        NewFile.reserve = full  # type: ignore[method-assign]


def begun(home: Path) -> tuple[nn.Module, Callable[[], object]]:
    """Save 1 and wait, write 2 into the weights, and return what saves that."""
    model = zero.shard(nn.Linear(1, SIZE, bias=False), 3, blocks=[])
    for number in (1, 2):
        nn.init.constant_(model.weight.to_local(), number)  # type: ignore[operator, union-attr]
        if number == 1:
            zero.save(home, "a", model, number=number)
    hold_back()
    return model, partial(zero.save, home, "a", model, wait=False, number=2)


def destroy(home: Path) -> None:
    _, save = begun(home)
    save()
    dist.destroy_process_group()


def fall_off(home: Path) -> None:
    begun(home)[1]()


def exit_0(home: Path) -> None:
    fall_off(home)
    sys.exit(0)


def exit_3(home: Path) -> None:
    fall_off(home)
    sys.exit(3)


def fail(home: Path) -> None:
    destroy(home)
    raise ZeroDivisionError


def wait_after_destroy(home: Path) -> None:
    _, save = begun(home)
    future = save()
    dist.destroy_process_group()
    go.set()
    future.result(60)  # type: ignore[attr-defined]
    os._exit(0)


def no_group(home: Path) -> None:
    model, save = begun(home)
    dist.destroy_process_group()
    for call in (save, partial(zero.save, home, "a", model), partial(zero.load, home, "a", model)):
        try:
            call()
        except RuntimeError as error:
            print(error)


def no_disk(home: Path) -> None:
    _, save = begun(home)
    no_space(1)
    save()
    dist.destroy_process_group()


def no_disk_and_exit_0(home: Path) -> None:
    no_disk(home)
    sys.exit(0)


def no_disk_and_told(home: Path) -> None:
    _, save = begun(home)
    no_space(0)
    future = save()
    go.set()
    with contextlib.suppress(OSError):
        future.result(60)  # type: ignore[attr-defined]


def no_disk_and_fail(home: Path) -> None:
    no_disk(home)
    raise ZeroDivisionError


def one_is_killed(home: Path) -> None:
    fall_off(home)
    both_have_begun.wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def all_are_terminated(home: Path) -> None:
    fall_off(home)
    both_have_begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)


def in_a_worker(home: Path) -> None:
    """As those of torch.multiprocessing that are forked; `take_part` makes them."""
    no_disk(home)
    go.set()


def forked_meanwhile(home: Path) -> None:
    """A child that ends as programs do has no save to wait for."""
    fall_off(home)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0


OLD, NEW = 1, 2
FAILED = "zero.save: the last save failed, and nobody asked for its result: "
NO_SPACE = f"{FAILED}[Errno 28] io.save: there is no space"
WAYS = {  # what each ends with, what the checkpoint then is, and what is said
    destroy: (0, NEW, ""),
    fall_off: (0, NEW, ""),
    exit_0: (0, NEW, ""),
    exit_3: (3, NEW, ""),
    fail: (1, NEW, "ZeroDivisionError"),
    wait_after_destroy: (0, NEW, ""),
    no_group: (0, OLD, "zero.save: torch.distributed has no process group, expected the one"),
    no_disk: (120, OLD, NO_SPACE),
    no_disk_and_exit_0: (120, OLD, NO_SPACE),
    no_disk_and_told: (0, OLD, ""),
    no_disk_and_fail: (1, OLD, NO_SPACE),
    one_is_killed: ((120, -9), OLD, FAILED),
    all_are_terminated: (-15, OLD, ""),
    in_a_worker: (120, OLD, NO_SPACE),
    forked_meanwhile: (0, NEW, ""),
}


def look_after(home: Path, number: int) -> None:
    """The checkpoint is whole, and the one of this number."""
    assert zero.inspect(home) == {"number": number}
    weight = {"model.weight": torch.empty(SIZE, 1)}
    torch.distributed.checkpoint.load(weight, storage_reader=zero.Reader(home / "a"), no_dist=True)
    assert weight["model.weight"].eq(number).all()


def main(folder: Path) -> Callable[[], None] | None:
    """Look after all ways, and return None; or what the rest of a process is."""
    torch.set_num_threads(1)
    chosen = sys.argv[2:] or [way.__name__ for way in WAYS]
    for way, (wanted, number, text) in WAYS.items():
        if way.__name__ not in chosen:
            continue
        home = folder / way.__name__
        home.mkdir()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                said = os.open(home / f"said{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                return partial(take_part, way, home, rank)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        said = [(home / f"said{rank}").read_text() for rank in range(2)]
        expected = list(wanted) if isinstance(wanted, tuple) else [wanted] * 2
        assert codes == expected, (way.__name__, codes, said)
        assert text in said[0], (way.__name__, said)
        assert text or said == ["", ""], (way.__name__, said)
        look_after(home, number)
        print(way.__name__, flush=True)
    return None


def take_part(way: Callable[[Path], None], home: Path, rank: int) -> None:
    if way is not in_a_worker:
        return join(way, home, rank)
    child = multiprocessing.get_context("fork").Process(target=join, args=(way, home, rank))
    child.start()
    child.join()
    sys.exit(child.exitcode)


def join(way: Callable[[Path], None], home: Path, rank: int) -> None:
    group = f"file://{home}/group"
    dist.init_process_group("gloo", group, timedelta(seconds=60), rank=rank, world_size=2)
    way(home)


if __name__ == "__main__":
    rest = main(Path(sys.argv[1]))
    if rest is not None:
        rest()
