"""Groups of processes that run test cases together, started once for many cases."""

import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import warm_python
from torch.overrides import TorchFunctionMode

DEADLINE = timedelta(seconds=60)  # for what all processes do together
GRACE = 15  # seconds that a process has, after another one failed, to say where it was
# Each process is a fork of one that has imported these and runs no threads yet.
PRELOAD = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # which fully_shard imports when it is called
    "deepspeed_ext.zero",
]


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


class Groups:
    """A group of processes for each number of them and each device, from its first case on.

    Args:
        module: has the functions, which are called as function(row, folder).
        folder: what they share.
        others: of other modules, whose processes are used; they end with those.
        on_gpus: whether cases that name no device are run on GPUs, one for each process.
    """

    def __init__(
        self, module: str, folder: Path, others: "Groups | None" = None, on_gpus: bool = False
    ) -> None:
        self._module = module
        self._folder = folder
        self._groups: dict[tuple[int, str], _Group] = {} if others is None else others._groups
        self._device = others._device if others else "cuda" if on_gpus else "cpu"
        self._errors: dict[tuple[Case, str], str] = {}

    def run(self, case: Case, device: str | None = None, least: int | None = None) -> None:
        """Run a case, once, and raise AssertionError if it has failed in any process.

        A group in which one has ends: its processes would no longer wait for the same things.

        Args:
            device: "cpu" or "cuda"; None: that of the option --on-gpus, or the CPU.
            least: the fewest processes that the case can do with, where there are fewer GPUs.
        """
        device = self._device if device is None else device
        if device == "cuda":
            there = torch.cuda.device_count()
            least = case.world if least is None else least
            if there < least:
                pytest.skip(f"needs {least} CUDA GPUs")
            case = case._replace(world=min(case.world, there))
        ran = case, device
        if ran not in self._errors:
            key = case.world, device
            folder = self.folder(device)
            if key not in self._groups:
                self._groups[key] = _Group(case.world, device, folder)
            self._errors[ran] = self._groups[key].run(case, self._module, folder)
            if self._errors[ran]:
                self._groups.pop(key).end()
        assert not self._errors[ran], self._errors[ran]

    def need_gloo(self) -> None:
        """Skip a test of what processes hear of one that is gone: with NCCL, nothing in Python.

        The host does not wait for the GPU, and torch's watchdog ends them when their time is over.
        """
        if self._device == "cuda":
            pytest.skip("needs gloo: with NCCL torch's watchdog ends processes that wait in vain")

    def folder(self, device: str) -> Path:
        """Return what those on a device share."""
        made = self._folder / device
        made.mkdir(exist_ok=True)
        return made

    def end(self) -> None:
        """End all processes."""
        while self._groups:
            self._groups.popitem()[1].end()


class _Group:
    def __init__(self, world: int, device: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        name = f"{os.urandom(8).hex()}.group"
        self._pipes, self._processes = [], []
        self._crashes = [folder / f"{name}.{rank}" for rank in range(world)]
        for rank in range(world):
            self._crashes[rank].touch()
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, rank, world, device, folder, name, self._crashes[rank]),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Case, module: str, folder: Path) -> str:
        """Return what has gone wrong."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, which is seen below
                pipe.send((case, module, folder))
        errors = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            answered = wait(list(waiting), GRACE if errors else None)
            if not answered:  # the others wait in vain
                break
            for pipe in answered:
                rank = waiting.pop(pipe)
                try:
                    error, seconds = pipe.recv()
                    warm_python.seconds += seconds
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    error = f"ended with {self._processes[rank].exitcode}"
                    error += f"\n{self._crashes[rank].read_text()}"
                if error:
                    errors[rank] = f"process {rank}: {error}"
        return "\n".join(errors[rank] for rank in sorted(errors))

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


class _DrawnOnTheHost(TorchFunctionMode):
    """What a generator of the host draws for a GPU is drawn there: the same numbers as without."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "generator" in kwargs and "device" not in kwargs and func in _DRAWS:
            return func(*args, **kwargs, device="cpu").cuda()
        return func(*args, **kwargs)


_DRAWS = {torch.rand, torch.randn, torch.randint, torch.randperm}


def _work(pipe, rank: int, world: int, device: str, folder: Path, name: str, crash: Path) -> None:
    faulthandler.enable(crash.open("w"))  # where each thread was, if a signal ends it
    torch.set_num_threads(1)
    gc.freeze()  # what was imported; many cases collect all else
    begin = 0.0
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=world,
            timeout=DEADLINE,
        )
        while True:
            case, module, shared = pipe.recv()
            function = getattr(importlib.import_module(module), case.function)
            logging.getLogger("deepspeed_ext").setLevel(logging.NOTSET)  # whatever one has set
            if device == "cuda":
                with torch.device("cuda", rank), _DrawnOnTheHost():
                    function(case.row, shared)
            else:
                function(case.row, shared)
            now = time.process_time()
            pipe.send(("", now - begin))
            begin = now
    except EOFError:  # whoever started it is gone
        os._exit(0)
    except BaseException:
        pipe.send((traceback.format_exc(), time.process_time() - begin))
        os._exit(1)  # so that the others notice at once
