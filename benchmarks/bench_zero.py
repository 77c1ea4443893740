"""Sharded training: `torchrun --nproc-per-node 2 -m benchmarks.bench_zero`, a GPU for each process.

A model of 1.5 B parameters (benchmarks/offload_model.py) takes steps in bfloat16 with float32
shards. Ours and torch's take turns of some steps, each with a model of its own; a turn is over when
all processes have ended it, the steps in host memory too. Rows "memory" are what our stages keep,
beside the table of zero.shard; in "checkpoint" the state of the model is saved and loaded, in both
ways, and "init" fills a model from a file. "engine" are steps of `initialize` beside zero.shard by
hand; "deepspeed" ours beside DeepSpeed's, and "offload-deepspeed" so with state in host memory. All
have DeepSpeed, if that is installed; its FusedAdam, which it compiles, is not needed.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks import zero_picture
from benchmarks.offload_model import Size
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from benchmarks.zero_contenders import (
    CONTENDERS,
    DEEPSPEED,
    DEEPSPEED_OFFLOAD,
    ENGINE,
    OURS,
    Contender,
    Trained,
    ZeroWorkload,
    deepspeeds,
    drop_garbage,
    engines,
    ours,
)
from benchmarks.zero_disk import checkpoints, fills
from benchmarks.zero_memory import memory
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.processors import ranges

SIZES = {
    "1b": Size(layers=16, width=2304, batch=4),
    "3b": Size(layers=26, width=2816, batch=4),
    "small": Size(layers=12, width=1024, batch=1, length=64),
    "page": Size(layers=8, width=512, vocabulary=8000, batch=1, length=64),
    "tiny": Size(layers=2, width=32, vocabulary=64, batch=2, length=16),
}
ROUNDS = 12
_WARM_UP = 2
_IN_A_ROW = 3
_USUAL_TOKENS = 8192
WORKLOADS = {
    "engine": [ZeroWorkload(2, clips=True), ZeroWorkload(3, clips=True)],
    "deepspeed": [
        ZeroWorkload(2),
        ZeroWorkload(2, clips=True),
        ZeroWorkload(3),
        ZeroWorkload(3, clips=True),
    ],
    "steps": [
        ZeroWorkload(2),
        ZeroWorkload(2, clips=True),
        ZeroWorkload(3),
        ZeroWorkload(3, clips=True),
    ],
    "micro-steps": [ZeroWorkload(1, micro_steps=8), ZeroWorkload(2, micro_steps=8)],
    "offload": [
        ZeroWorkload(3, offloads=True, shards=dtype, compact=compact)
        for compact in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    ],
    "offload-deepspeed": [ZeroWorkload(3, offloads=True, shards=torch.bfloat16, compact=True)],
}
BESIDE: dict[str, dict[str, Contender]] = {
    "engine": {ENGINE: engines, OURS: ours},
    "deepspeed": {OURS: ours, DEEPSPEED: deepspeeds},
    "offload-deepspeed": CONTENDERS | {DEEPSPEED_OFFLOAD: deepspeeds},
}
DISK = {"checkpoint": checkpoints, "init": fills}
ROWS = (*WORKLOADS, "memory", *DISK)


def steps(
    work: ZeroWorkload, contenders: Mapping[str, Contender], size: Size, device: str, rounds: int
) -> Result:
    """Let contenders take turns."""
    trained = {name: Trained(make(work, size, device), size) for name, make in contenders.items()}
    tokens = size.batch * size.length
    name = work.name + f", {tokens:,} tokens in a process" * (tokens != _USUAL_TOKENS)
    name += ", beside DeepSpeed" * (not {DEEPSPEED, DEEPSPEED_OFFLOAD}.isdisjoint(contenders))
    progress = tqdm(total=rounds, desc=name, disable=dist.get_rank() > 0)
    for i in range(rounds + _WARM_UP):
        order = list(trained.values())
        for each in order if i % 2 else order[::-1]:
            each.steps(_IN_A_ROW)
        progress.update(i >= _WARM_UP)
    timings = {name: Timing.of(each.seconds[_WARM_UP:]) for name, each in trained.items()}
    first, *others = trained
    notes = [
        f"{name}: {tokens * dist.get_world_size() / timings[name].median:,.0f} tokens/s,"
        f" {each.peak / 2**30:.2f} GiB on top in a step"
        for name, each in trained.items()
    ]
    optimizer = trained[OURS].optimizer
    if isinstance(optimizer, OffloadOptimizer):
        found = optimizer.stats()
        count = _IN_A_ROW * (rounds + _WARM_UP)
        notes.append(
            f"the host's step takes {found['step_seconds'] / count * 1e3:.0f} ms, with"
            f" {found['threads']} threads on processors {ranges(found['processors'])}; of"
            f" {found['ahead']} speculative steps {found['committed']} counted;"
            f" {found['late']} came late"
        )
    notes += [
        f"{first} is {timings[other].median / timings[first].median:.3f}x as fast as {other}"
        for other in others
    ]
    elements = sum(p.numel() for p in trained[OURS].model.parameters())
    return Result(name, torch.get_num_threads(), elements, 0, timings, notes=notes)


def measured(rows: str, options: argparse.Namespace, device: str) -> Iterator[Result]:
    """Yield the results of some rows; print those that are no times."""
    size, is_first = SIZES[options.size], dist.get_rank() == 0
    size = replace(size, batch=options.batch or size.batch)
    if rows.endswith("deepspeed") and find_spec("deepspeed") is None:
        print(f"{rows}: skipped, deepspeed is not installed")
        return
    for work in WORKLOADS.get(rows, ()):
        contenders = BESIDE.get(rows, CONTENDERS)
        if rows == "engine" and find_spec("deepspeed") is not None:
            contenders = contenders | {DEEPSPEED: deepspeeds}
        yield steps(work, contenders, size, device, options.rounds)
        drop_garbage(device)
    if rows in DISK:
        yield from DISK[rows](size, device, options.disk_rounds, options.folder)
    if rows == "memory":
        for kept in memory(size, device):
            if is_first:
                print(kept, flush=True)
    drop_garbage(device)


def main() -> None:
    """Measure, and let the first process print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--batch", type=int, help="sequences of 2,048 tokens in a process")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, by commas")
    parser.add_argument("--disk-rounds", type=int, default=3, help="of checkpoint and init")
    parser.add_argument("--folder", type=Path, help="for files; default: a temporary one")
    threads = len(os.sched_getaffinity(0))  # torchrun would give torch one
    parser.add_argument("--threads", type=int, default=threads, help="of torch in each process")
    parser.add_argument("--picture", type=Path, help="draw a step of each stage into this file")
    add_option(parser)
    options = parser.parse_args()
    unknown = set(options.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows has {sorted(unknown)}, expected some of {', '.join(ROWS)}")
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    described = introduced(device) if is_first else {}
    if options.picture is not None:
        with tqdm(total=4, desc="stages", disable=not is_first) as progress:
            size = replace(SIZES[options.size], batch=options.batch or SIZES[options.size].batch)
            zero_picture.draw(size, device, options.picture, progress.update)
        options.rows = ""
    results = []
    for rows in filter(None, options.rows.split(",")):
        for result in measured(rows, options, device):
            results.append(result)
            if is_first:
                show(result)
                keep(options.save, results, described)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
