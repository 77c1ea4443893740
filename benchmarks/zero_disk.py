"""Checkpoints and weights on the disk, for the sharding benchmark."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.offload_model import Size
from benchmarks.results import Result, Timing
from benchmarks.zero_contenders import CONTENDERS, OURS, Trained, Work, synchronize
from deepspeed_ext import zero

_STALL, _SAVE, _LOAD = "stall of a save", "save, to the disk", "load"
_ROUNDS = 3


def checkpoints(size: Size, device: str, where: Path | None) -> Iterator[Result]:
    """Save and load the model and its optimizer, in stage 3, in all ways."""
    work = Work(3)
    paths = [tempfile.mkdtemp(dir=where) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    home = Path(str(paths[0]))
    trained = {name: Trained(make(work, size, device), size) for name, make in CONTENDERS.items()}
    found: dict[str, dict[str, list[float]]] = {_STALL: {}, _SAVE: {}, _LOAD: {}}
    for each in trained.values():
        each.steps(1)
    for i in range(_ROUNDS):
        for name, each in trained.items():
            folder = home / f"{i}-{len(name)}"
            for what, seconds in _save_and_load(each, name, folder, device).items():
                found[what].setdefault(name, []).append(seconds)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
    elements = sum(p.numel() for p in trained[OURS].model.parameters())
    for what, of_each in found.items():
        timings = {name: Timing.of(seconds) for name, seconds in of_each.items()}
        yield Result(what, torch.get_num_threads(), elements, 12 * elements, timings)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(home)


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
    dist.barrier()
    os.sync()
    seconds[_SAVE] = time.perf_counter() - begin
    synchronize(device)
    begin = time.perf_counter()
    if how == OURS:
        zero.load(folder, None, trained.model, trained.optimizer)
    else:
        dcp.load(_state_of(trained), checkpoint_id=folder)
    synchronize(device)
    seconds[_LOAD] = time.perf_counter() - begin
    return seconds


def _state_of(trained: Trained) -> dict[str, Any]:
    return dict(
        zip(("model", "optimizer"), get_state_dict(trained.model, trained.optimizer), strict=True)
    )
