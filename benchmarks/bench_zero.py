"""Sharded training: `torchrun --nproc-per-node 2 -m benchmarks.bench_zero`, a GPU for each process.

A model of 1.2 B parameters (benchmarks/offload_model.py) takes steps in bfloat16 with float32
shards. Ours and torch's take turns, each with a model of its own; a step is over when all processes
have ended it. Then the state of the model is saved and loaded, in both ways.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from tqdm import tqdm

from benchmarks.offload_model import Block, Decoder, Size, make_data
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

OURS, TORCH = "deepspeed_ext.zero", "plain FSDP2, torch's AdamW (fused)"
SIZES = {
    "1b": Size(layers=16, width=2304, batch=4),
    "3b": Size(layers=26, width=2816, batch=4),
    "small": Size(layers=12, width=1024),
    "tiny": Size(layers=2, width=32, vocabulary=64, batch=2, length=16),
}
ROUNDS = 12
_MAX_NORM = 1.0
_OPTIONS = {"lr": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Work:
    """A way to train.

    Args:
        stage: 2 or 3.
        clips: to a global norm.
        offloads: the state of the optimizer, ours; all shards, torch's.
    """

    stage: int
    clips: bool = False
    offloads: bool = False

    @property
    def name(self) -> str:
        """As the results have it."""
        ending = ", clips" * self.clips + ", state in host memory" * self.offloads
        return f"a step of stage {self.stage}{ending}"


WORKS = [Work(2), Work(2, clips=True), Work(3), Work(3, clips=True), Work(3, offloads=True)]
Step = Callable[[], object]


def ours(work: Work, size: Size, device: str) -> tuple[nn.Module, Any, Step]:
    """Return a model, its optimizer, and what steps."""
    with zero.Init(seed=0) as init:
        model = Decoder(size)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    low, high = torch.bfloat16, torch.float32
    zero.shard(model, work.stage, mesh=mesh, param_dtype=low, reduce_dtype=high, blocks=[Block])
    init.fill(model)
    optimizer: Any
    if work.offloads:
        optimizer = OffloadOptimizer(model.parameters(), model=model, **_OPTIONS)
    else:
        kind = FusedAdam if device == "cuda" else DeepSpeedCPUAdam
        optimizer = kind(model.parameters(), **_OPTIONS)
    step = partial(optimizer.clip_and_step, _MAX_NORM) if work.clips else optimizer.step
    return model, optimizer, step


def torchs(work: Work, size: Size, device: str) -> tuple[nn.Module, Any, Step]:
    """Return the same in plain torch."""
    torch.manual_seed(0)
    with torch.device("cpu" if work.offloads else device):
        model = Decoder(size)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    pins = CPUOffloadPolicy(pin_memory=device == "cuda")
    offload = pins if work.offloads else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=work.stage == 3, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_OPTIONS)

    def step() -> None:
        if work.clips:
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()

    return model, optimizer, step


class Trained:
    """One of two models that take turns."""

    def __init__(self, made: tuple[nn.Module, Any, Step], size: Size, device: str) -> None:
        self.model, self.optimizer, self._step = made
        self._data = make_data(size, device)
        self._device = device
        self.seconds: list[float] = []
        self.peak = 0

    def step(self, is_timed: bool = True) -> None:
        """Take a step, and note how long it took and how much memory came on top."""
        _synchronize(self._device)
        before = _allocated(self._device)
        begin = time.perf_counter()
        self.model(*self._data).backward()
        self._step()
        self.optimizer.zero_grad()
        _synchronize(self._device)
        if is_timed:
            self.seconds.append(time.perf_counter() - begin)
            self.peak = max(self.peak, _peak(self._device) - before)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def steps(work: Work, size: Size, device: str, rounds: int) -> Iterator[tuple[str, Trained]]:
    """Let both take turns; yield each with its model."""
    made = {OURS: ours, TORCH: torchs}
    both = {name: Trained(make(work, size, device), size, device) for name, make in made.items()}
    progress = tqdm(total=rounds, desc=work.name, disable=dist.get_rank() > 0)
    for i in range(rounds + 3):
        order = list(both.values())
        for trained in order if i % 2 else order[::-1]:
            trained.step(is_timed=i >= 3)
        progress.update(i >= 3)
    yield from both.items()


def saves(trained: Trained, how: str, folder: Path, device: str) -> dict[str, float]:
    """Return how long training stands still, how long a save takes in all, and a load."""
    seconds = {}
    _synchronize(device)
    begin = time.perf_counter()
    if how == OURS:
        pending = zero.save(folder, "a", trained.model, trained.optimizer, wait=False)
    else:
        state = dict(zip(("model", "optimizer"), state_of(trained), strict=True))
        pending = dcp.async_save(state, checkpoint_id=folder)
    seconds["stall of a save"] = time.perf_counter() - begin
    pending.result()
    dist.barrier()
    os.sync()
    seconds["save, to the disk"] = time.perf_counter() - begin
    _synchronize(device)
    begin = time.perf_counter()
    if how == OURS:
        zero.load(folder, None, trained.model, trained.optimizer)
    else:
        dcp.load(
            dict(zip(("model", "optimizer"), state_of(trained), strict=True)), checkpoint_id=folder
        )
    _synchronize(device)
    seconds["load"] = time.perf_counter() - begin
    return seconds


def state_of(trained: Trained) -> tuple[Any, Any]:
    return get_state_dict(trained.model, trained.optimizer)


def main() -> None:
    """Measure, and let the first process print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one")
    add_option(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    described = introduced(device) if is_first else None
    size, results = SIZES[options.size], []
    for work in WORKS:
        timings, peaks, kept = {}, [], {}
        for name, trained in steps(work, size, device, options.rounds):
            timings[name] = Timing.of(trained.seconds)
            peaks.append(f"{name}: {trained.peak / 2**30:.2f} GiB on top in a step")
            elements = sum(p.numel() for p in trained.model.parameters())
            kept[name] = trained
        results.append(Result(work.name, torch.get_num_threads(), elements, 0, timings))
        if is_first:
            show(results[-1])
            print("\n".join(peaks), flush=True)
        if work == Work(3):
            results += checkpoints(kept, options.folder, device, elements, is_first)
        kept.clear()
        del trained
    if is_first:
        keep(options.save, results, described)
    dist.destroy_process_group()


def checkpoints(
    both: dict[str, Trained], where: Path | None, device: str, elements: int, is_first: bool
) -> list[Result]:
    """Save and load both three times."""
    paths = [tempfile.mkdtemp(dir=where) if is_first else None]
    dist.broadcast_object_list(paths)
    home = Path(str(paths[0]))
    found: dict[str, dict[str, list[float]]] = {}
    for i in range(3):
        for how, trained in both.items():
            folder = home / f"{i}{len(how)}"
            for name, seconds in saves(trained, how, folder, device).items():
                found.setdefault(name, {}).setdefault(how, []).append(seconds)
            dist.barrier()
            if is_first:
                shutil.rmtree(folder)
    threads, made = torch.get_num_threads(), []
    for name, of_each in found.items():
        timings = {how: Timing.of(seconds) for how, seconds in of_each.items()}
        made.append(Result(name, threads, elements, 12 * elements, timings))
        if is_first:
            show(made[-1])
    if is_first:
        shutil.rmtree(home)
    return made


if __name__ == "__main__":
    main()
