"""What the benchmarks of ops share: pieces of work, tensors for them, and the command line."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import ROUNDS, WARM_UP, Contender, Interrupted, measure
from benchmarks.results import Result, add_option, introduced, keep, show
from benchmarks.stream import Stream

Shapes = Sequence[tuple[int, ...]]
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """Tensors of these shapes; `contenders` makes the ways to work on them, ours first."""

    name: str
    shapes: Shapes
    bytes_each: int  # per element, that the best of passes reads and writes
    contenders: Callable[[Shapes, str], list[Contender]]
    only_reads: bool = False
    times: int = 1  # that all of it is gone through in a call
    tokens: int = 0  # that come of a call, where that says something
    warm_up: int = WARM_UP  # calls before those that are timed


def leaves(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parameters with gradients, random and for nobody else."""
    made = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    for leaf in made:
        leaf.grad = torch.randn_like(leaf)
    return made


def llama(layers: int, embedding: bool) -> Shapes:
    """The shapes of an 8 B Llama with fewer layers: 2.27 B elements with 8 and the embedding."""
    width, kv, hidden, vocabulary = 4096, 1024, 14336, 128256
    attention = [(width, width), (kv, width), (kv, width), (width, width)]
    feed_forward = [(hidden, width), (hidden, width), (width, hidden)]
    layer = [*attention, *feed_forward, (width,), (width,)]
    return [(vocabulary, width)] * embedding + layer * layers


BIG, MANY, SMALL = [(1 << 20,)] * 64, [(4096,)] * 16384, [(256,)] * 16384


def bench(
    work: Workload, stream: Stream, threads: int, rounds: int, progress: "tqdm[None]"
) -> Result:
    """Measure one piece of work; after Ctrl-C the result is of the rounds that were whole."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    elements = sum(torch.Size(shape).numel() for shape in work.shapes)
    bytes_moved = elements * work.bytes_each
    make = stream.read_contender if work.only_reads else stream.contender
    ceiling = repeated(make(bytes_moved, threads), work.times)
    contenders = [*work.contenders(work.shapes, stream.device), ceiling]
    only = 0
    try:
        timings = measure(contenders, stream.device, rounds, progress, work.warm_up)
    except Interrupted as error:
        timings, only = error.timings, error.rounds
    ceilings = [contender.name for contender in contenders if contender.is_ceiling]
    moved = bytes_moved * work.times
    notes = [
        f"{name}: {work.tokens / timing.median:,.0f} tokens per second"
        for name, timing in timings.items()
        if work.tokens and name not in ceilings
    ]
    if only:
        notes.append(f"interrupted: after {only} of {rounds} rounds")
    elements *= work.times
    return Result(work.name, threads, elements, moved, timings, ceilings, notes=notes, only=only)


def repeated(contender: Contender, times: int) -> Contender:
    """Let a contender do so many times what it does."""

    def run() -> None:
        for _ in range(times):
            contender.run()

    return contender if times == 1 else Contender(contender.name, run, contender.is_ceiling)


def keep_memory() -> None:
    """Begin this process anew with a malloc that keeps what is freed, unless it has one.

    Else all results of 32 MiB or more are of memory that the kernel has to find and clear, page by
    page, at every call: that takes several times as long as what any contender does with it.
    """
    name, kept = "GLIBC_TUNABLES", f"{1 << 40}"
    if name not in os.environ:
        tunables = (f"glibc.malloc.{what}_threshold={kept}" for what in ("mmap", "trim"))
        os.environ[name] = ":".join(tunables)
        os.execv(sys.executable, sys.orig_argv)


def main(description: str, workloads_of: Mapping[str, Sequence[Workload]]) -> None:
    """Read the command line, measure what it asks for, and show it.

    Args:
        description: for --help.
        workloads_of: what there is to measure on "cpu" and on "cuda".
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=sorted(workloads_of), default=next(iter(workloads_of)))
    parser.add_argument("--threads", default="1,2", help="thread counts on the CPU, such as 1,2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="workloads whose name has this text in it")
    add_option(parser)
    options = parser.parse_args()
    if options.device == "cpu":
        keep_memory()
    threads = [0] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    workloads = [work for work in workloads_of[options.device] if options.only in work.name]
    described = introduced(options.device)
    stream, results = Stream(options.device), []
    try:
        with tqdm(total=len(workloads) * len(threads) * options.rounds, desc="rounds") as progress:
            for work in workloads:
                for count in threads:
                    results.append(bench(work, stream, count, options.rounds, progress))
                    show(results[-1])
                    if results[-1].only:
                        raise KeyboardInterrupt
                    gc.collect()  # the tensors of this work, before those of the next
                    torch._dynamo.reset()  # it compiles a function for so many shapes only
                    torch.cuda.empty_cache()
    finally:  # what is measured is kept, whatever fails after it
        keep(options.save, results, described)
