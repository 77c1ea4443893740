"""Processes of one host that step together: `python -m benchmarks.bench_processes`.

Each of 1, 2, 4 and 8 processes steps its part of the same state, Adam in float32, by the worker of
OffloadOptimizer, started as torchrun starts processes. They begin at a barrier, and a step is over
with the last of them. The ceiling is a stream of one process, a thread for each processor. All are
there from the beginning, and take turns.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness import ROUNDS, WARM_UP, seconds_on_cpu
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from benchmarks.stream import NAME, Stream
from deepspeed_ext.offload.worker import Task, Urgency, Worker
from deepspeed_ext.op_builder import load
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.processors import ranges, share_here

ELEMENTS = 2**27
_BYTES = 28  # of an element, that a step reads and writes
_PIECE = 2**22  # elements of a parameter
_PAUSE = 0.01  # seconds, as the harness has it


class Together:
    """Processes that step at the same time.

    Args:
        count: how many.
        elements: of all of them.
        threads: of each; None: its share.
    """

    def __init__(self, count: int, elements: int, threads: int | None) -> None:
        self.name = f"{count} process{'es' * (count > 1)}"
        context = multiprocessing.get_context("spawn")  # so that OpenMP looks at the environment
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        before = os.environ.copy()
        for rank in range(count):
            os.environ.update(_as_torchrun(rank, count))
            ours, theirs = context.Pipe()
            arguments = (theirs, f"file://{self._folder.name}/group", elements // count, threads)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            os.environ.clear()
            os.environ.update(before)
        self.places = [pipe.recv() for pipe in self._pipes]

    def seconds(self) -> float:
        """Time one step of all, from the first that begins to the last that ends."""
        time.sleep(_PAUSE)
        for pipe in self._pipes:
            pipe.send(None)
        begins, ends = zip(*[pipe.recv() for pipe in self._pipes], strict=True)
        return float(max(ends) - min(begins))

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _as_torchrun(rank: int, count: int) -> dict[str, str]:
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in found.items()}


def _serve(pipe: Connection, meeting: str, elements: int, threads: int | None) -> None:
    """Step whenever the parent says so."""
    rank, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    share = share_here(threads)
    worker = Worker(share, partial(load, "cpu_adam"))
    made: list[DeepSpeedCPUAdam] = []

    def do(run: object) -> None:
        task = worker.submit(Task(run, Urgency.STEP))  # type: ignore[arg-type]
        worker.wait([task])
        if task.error is not None:
            raise task.error

    do(lambda: made.append(_optimizer(elements)))
    [optimizer] = made
    do(optimizer.step)
    pipe.send(f"{worker.threads} on {ranges(share.processors)}")
    try:
        while True:
            pipe.recv()
            dist.barrier()
            begin = time.perf_counter()
            do(optimizer.step)
            pipe.send((begin, time.perf_counter()))
    except EOFError:
        worker.close()
        dist.destroy_process_group()


def _optimizer(elements: int) -> DeepSpeedCPUAdam:
    """Return one whose parameters and gradients the current thread touches first."""
    params = []
    for begin in range(0, elements, _PIECE):
        params.append(torch.ones(min(_PIECE, elements - begin)).requires_grad_())
        params[-1].grad = torch.full_like(params[-1], 1e-3)
    return DeepSpeedCPUAdam(params, lr=1e-3)


def measured(options: argparse.Namespace, groups: list[Together]) -> Result:
    """Let all take turns; another one begins each round."""
    threads, nbytes = len(os.sched_getaffinity(0)), _BYTES * options.elements
    stream = Stream("cpu").contender(nbytes, threads)
    contenders = {group.name: group.seconds for group in groups}
    contenders[NAME] = lambda: seconds_on_cpu(stream.run)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in tqdm(range(-WARM_UP, options.rounds), desc="rounds", disable=None):
        first = i % len(names)
        for name in (*names[first:], *names[:first]):
            seconds = contenders[name]()
            if i >= 0:
                found[name].append(seconds)
    timings = {name: Timing.of(seconds) for name, seconds in found.items()}
    notes = [
        f"{group.name}: {timings[NAME].median / timings[group.name].median:.3f} of the stream;"
        f" threads {', '.join(group.places)}"
        for group in groups
    ]
    work = f"Adam fp32 by processes of one host, {options.elements:,}"
    work += f", threads={options.threads}" * (options.threads is not None)
    return Result(work, threads, options.elements, nbytes, timings, (NAME,), notes=notes)


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    counts = [str(n) for n in (1, 2, 4, 8) if n <= len(os.sched_getaffinity(0))]
    parser.add_argument("--processes", default=",".join(counts), help="default: %(default)s")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="of each process; default: its share")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_option(parser)
    options = parser.parse_args()
    described = introduced("cpu")
    groups: list[Together] = []
    try:
        for count in map(int, options.processes.split(",")):
            groups.append(Together(count, options.elements, options.threads))
        result = measured(options, groups)
    finally:
        for group in groups:
            group.end()
    show(result)
    keep(options.save, [result], described)
    return 0


if __name__ == "__main__":
    sys.exit(main())
