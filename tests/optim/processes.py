"""Run test cases in several processes at once: started one time, in groups of several sizes."""

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

DEADLINE = timedelta(seconds=60)  # for what all processes do together
visits = 0  # groups that this process has been in
GRACE = 2  # seconds that a process has, after another one failed, to say where it was


class Case(NamedTuple):
    """A function of a test module, called in each process of a group.

    Attributes:
        world: processes in the group.
        function: name of the function; it raises, in any process, when something is wrong.
        row: name of what it is tried with, its first argument.
    """

    world: int
    function: str
    row: str


def run(module: str, cases: Iterable[Case], folder: Path, device: str) -> Callable[[Case], None]:
    """Run cases in the given order and return what raises AssertionError if one has failed.

    A failed case ends all: the processes would no longer wait for the same things. Each function is
    called as function(row, folder) in a process group over the device's back end.
    """
    cases = list(cases)
    context = multiprocessing.get_context("spawn")  # fork would copy running threads badly
    processes = [
        context.Process(target=_work, args=(rank, module, cases, folder, device))
        for rank in range(max(case.world for case in cases))
    ]
    for process in processes:
        process.start()
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        ended = [waiting.pop(sentinel) for sentinel in wait(list(waiting))]
        for process in ended:
            process.join()  # which sets the exit code
        if any(process.exitcode for process in ended):
            for process in waiting.values():  # they have noticed, or wait in vain
                process.join(GRACE)
                process.kill()

    def check(case: Case) -> None:
        errors = [path.read_text() for path in sorted(folder.glob(f"{_title(case)}.error*"))]
        assert not errors, "\n".join(errors)
        for rank in range(case.world):
            done = folder / f"{_title(case)}.done{rank}"
            assert done.exists(), f"did not run in process {rank}: an earlier case has failed"

    return check


def _title(case: Case) -> str:
    return "-".join(map(str, case))


def _work(rank: int, module: str, cases: list[Case], folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    functions = importlib.import_module(module)
    world = 0  # of the case before, in which this process need not have taken part
    for case in cases:
        changed, world = case.world != world, case.world
        if rank >= world:
            continue
        try:
            if changed:
                _join_group(rank, case, folder, device)
            getattr(functions, case.function)(case.row, folder)
            (folder / f"{_title(case)}.done{rank}").touch()
        except BaseException:
            (folder / f"{_title(case)}.error{rank}").write_text(
                f"process {rank}:\n{traceback.format_exc()}"
            )
            os._exit(1)  # so that the others notice at once
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, case: Case, folder: Path, device: str) -> None:
    global visits
    visits += 1
    if dist.is_initialized():
        dist.destroy_process_group()
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/{_title(case)}.group",
        rank=rank,
        world_size=case.world,
        timeout=DEADLINE,
    )
