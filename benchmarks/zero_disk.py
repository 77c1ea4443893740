"""Checkpoints and weights on the disk, for the sharding benchmark."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from tqdm import tqdm

from benchmarks.disk_rivals import PlainLoop
from benchmarks.offload_model import Block, Decoder, Size
from benchmarks.results import Result, Timing
from benchmarks.zero_contenders import CONTENDERS, OURS, Trained, ZeroWorkload, mesh_on, synchronize
from deepspeed_ext import io, zero
from deepspeed_ext.io import PinnedBuffer

PLAIN = "plain loop, 16 threads"
_STALL, _SAVE, _LOAD = "stall of a save", "save, to the disk", "load"
_FILL = "zero.Init from a safetensors file"
_EACH = 4 << 20  # bytes of a request of the plain loop
_PLAIN_BYTES = 4 << 30  # that it moves at most; the rest is computed


def checkpoints(size: Size, device: str, rounds: int, where: Path | None) -> Iterator[Result]:
    """Save and load the model and its optimizer, in stage 3, in all ways, from a cold cache."""
    work = ZeroWorkload(3)
    trained = {name: Trained(make(work, size, device), size) for name, make in CONTENDERS.items()}
    found: dict[str, dict[str, list[float]]] = {_STALL: {}, _SAVE: {}, _LOAD: {}}
    for each in trained.values():
        each.steps(1)
    elements = sum(p.numel() for p in trained[OURS].model.parameters())
    nbytes = 12 * elements
    with _folder(where) as home:
        for i in range(rounds):
            for name, each in trained.items():
                folder = home / f"{i}-{len(name)}"
                _note(found, name, _save_and_load(each, name, folder, device))
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(folder)
            _note(found, PLAIN, _plain(home, nbytes))
    for what, of_each in found.items():
        yield _result(what, elements, nbytes, of_each)


def fills(size: Size, device: str, rounds: int, where: Path | None) -> Iterator[Result]:
    """Fill a model of bfloat16 in stage 3 from a safetensors file, from a cold cache."""
    seconds: list[float] = []
    plain: list[float] = []
    with _folder(where) as home:
        path = home / "model.safetensors"
        if dist.get_rank() == 0:
            with torch.device(device):
                model = Decoder(size).bfloat16()
            elements = sum(p.numel() for p in model.parameters())
            io.save(model.state_dict(), path)
            del model
        for _ in range(rounds):
            dist.barrier()
            _forget(home)
            with zero.Init(files=path) as init:
                model = Decoder(size).bfloat16()
            elements = sum(p.numel() for p in model.parameters())
            zero.shard(model, 3, mesh=mesh_on(device), blocks=[Block])
            seconds.append(_timed(lambda m=model, i=init: i.fill(m), device))
            del model
            plain.append(_plain(home, 2 * elements)[_LOAD])
    yield _result(_FILL, elements, 2 * elements, {OURS: seconds, PLAIN: plain})


def _result(what: str, elements: int, nbytes: int, seconds: dict[str, list[float]]) -> Result:
    timings = {name: Timing.of(each) for name, each in seconds.items()}
    ceilings = [PLAIN] if PLAIN in timings else []
    return Result(what, torch.get_num_threads(), elements, nbytes, timings, ceilings)


def _note(found: dict[str, dict[str, list[float]]], name: str, seconds: dict[str, float]) -> None:
    """Add what a round took, and print it: there may not be time for another."""
    for what, each in seconds.items():
        found[what].setdefault(name, []).append(each)
    if dist.get_rank() == 0:
        tqdm.write(f"{name}: {', '.join(f'{what} {s:.2f} s' for what, s in seconds.items())}")


def _save_and_load(trained: Trained, how: str, folder: Path, device: str) -> dict[str, float]:
    """Return how long training stands still, how long a save takes in all, and a load."""
    seconds = {}
    synchronize(device)
    begin = time.perf_counter()
    pending: Any
    if how == OURS:
        pending = zero.save(folder, "a", trained.model, trained.optimizer, wait=False)
    else:
        pending = dcp.async_save(_state_of(trained), checkpoint_id=folder)
    seconds[_STALL] = time.perf_counter() - begin
    pending.result()
    _sync(folder)
    dist.barrier()
    seconds[_SAVE] = time.perf_counter() - begin
    _forget(folder)

    def load() -> None:
        if how == OURS:
            zero.load(folder, None, trained.model, trained.optimizer)
        else:
            dcp.load(_state_of(trained), checkpoint_id=folder)

    seconds[_LOAD] = _timed(load, device)
    return seconds


def _plain(home: Path, nbytes: int) -> dict[str, float]:
    """Return how long all processes take together to write and read so many bytes, directly."""
    share = nbytes // dist.get_world_size()
    count = max(1, min(share, _PLAIN_BYTES) // _EACH)
    loop, buffer = _loop(), PinnedBuffer(64 << 20)
    path = home / f"plain-{dist.get_rank()}"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, count * _EACH)
        os.fsync(file.fileno())

    def move(write: bool) -> None:
        loop(path, write, buffer.address, buffer.nbytes, count, _EACH, 16)
        if write:
            _sync(path)

    scale = share / (count * _EACH)
    found = {_SAVE: _timed(lambda: move(True), "cpu") * scale}
    found[_LOAD] = _timed(lambda: move(False), "cpu") * scale
    path.unlink()
    return found


@cache
def _loop() -> PlainLoop:
    return PlainLoop()


def _timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds until all processes have done it."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def _folder(where: Path | None) -> Iterator[Path]:
    """Make a folder for all processes, and remove it in the end."""
    paths = [tempfile.mkdtemp(dir=where) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    try:
        yield Path(str(paths[0]))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(str(paths[0]))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sync(path: Path) -> None:
    """Bring files to the disk."""
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _forget(path: Path) -> None:
    """Have nothing of them in the page cache."""
    dist.barrier()
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    dist.barrier()


def _state_of(trained: Trained) -> dict[str, Any]:
    return dict(
        zip(("model", "optimizer"), get_state_dict(trained.model, trained.optimizer), strict=True)
    )
