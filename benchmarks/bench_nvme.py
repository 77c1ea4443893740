"""Steps with state on disk: `python -m benchmarks.bench_nvme`, beside what bounds them.

A step reads all state and writes all state. Nobody is faster than the slower of the step in host
memory and of a loop that reads and writes as many bytes at the same time, at the best of some
depths and sizes. A commit writes the weights, beside which stands a loop that writes as many bytes.
All take turns in one process. With --layers whole steps of a model are taken, some in a row, as the
first pieces are read while backward runs, and the last ones written during the next forward. With
--company a thread of Python computes beside steps: what it costs is what it adds to a process that
takes a processor and no more.
"""

import argparse
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn import Parameter
from tqdm import tqdm

from benchmarks.company import beside_process, beside_thread
from benchmarks.harness import Contender, measure
from benchmarks.offload_model import Size, make_data, make_model
from benchmarks.results import Result, add_option, introduced, keep, show
from deepspeed_ext.io import AsyncIO, File, PinnedBuffer
from deepspeed_ext.offload import OffloadOptimizer, estimate
from deepspeed_ext.optim import DeepSpeedCPUAdam

TENSORS = 24
FORMATS = {
    "float32": {"dtype": torch.float32},
    "compact": {"dtype": torch.bfloat16, "state_dtype": torch.uint8, "master": "remainder"},
}
Whole = Callable[[OffloadOptimizer], None]
Loop = Callable[[AsyncIO, File, int, int, int], Callable[[], None]]
PIECES = {"4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}


def loop(engine: AsyncIO, file: File, total: int, piece: int, depth: int) -> Callable[[], None]:
    """Return what reads a file once and writes it once, some pieces at a time."""
    slabs = [PinnedBuffer(piece).tensor() for _ in range(depth)]

    def run() -> None:
        places = list(range(0, total - piece + 1, piece))
        writes = {}
        reads = {i: engine.read(slabs[i], file, at) for i, at in enumerate(places[: depth // 2])}
        for i, at in enumerate(places):
            reads.pop(i).result()
            writes[i] = engine.write(slabs[i % depth], file, at)
            ahead = i + depth // 2
            if ahead < len(places):
                if ahead - depth in writes:
                    writes.pop(ahead - depth).result()
                reads[ahead] = engine.read(slabs[ahead % depth], file, places[ahead])
        for write in writes.values():
            write.result()

    return run


def writes(engine: AsyncIO, file: File, total: int, piece: int, depth: int) -> Callable[[], None]:
    """Return what writes the beginning of a file, some pieces at a time."""
    slabs = [PinnedBuffer(piece).tensor() for _ in range(depth)]

    def run() -> None:
        under_way = deque()
        for i, at in enumerate(range(0, total, piece)):
            if len(under_way) == depth:
                under_way.popleft().result()
            part = slabs[i % depth][: min(piece, total - at)]
            under_way.append(engine.write(part, file, at))
        for write in under_way:
            write.result()

    return run


def stepping(optimizer: OffloadOptimizer) -> Callable[[], None]:
    """Return a step whose state is all on disk at its end."""

    def run() -> None:
        optimizer.step()
        optimizer._pipeline.finish_disk()

    return run


def whole_steps(model: nn.Module, size: Size, device: str, in_a_row: int) -> tuple[Whole, Whole]:
    """Return what takes whole steps with an optimizer, and what takes none beside backward."""
    tokens, targets = make_data(size, device)
    params = list(model.parameters())

    def backward() -> None:
        for param in params:
            param.grad = None
        model(tokens, targets).backward()

    def alone(_: OffloadOptimizer) -> None:
        for _ in range(in_a_row):
            backward()

    def steps(optimizer: OffloadOptimizer) -> None:
        for _ in range(in_a_row):
            backward()
            optimizer.step()
        optimizer._pipeline.finish_disk()

    return steps, alone


def flat_params(elements: int, dtype: torch.dtype, device: str) -> list[Parameter]:
    """Return parameters with gradients."""
    size = elements // TENSORS // 4096 * 4096
    params = [Parameter(torch.zeros(size, dtype=dtype, device=device)) for _ in range(TENSORS)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return params


class Disk:
    """Loops that only read and write, in a file of their own."""

    def __init__(self, path: str, nbytes: int, budget: int, stack: ExitStack) -> None:
        self._engine, self._budget = stack.enter_context(AsyncIO()), budget
        self._file = File.scratch(path)
        stack.callback(self._file.close)
        self._file.allocate(0, nbytes)

    def contenders(self, kind: str, made: Loop, nbytes: int, times: int = 1) -> list[Contender]:
        """Return one for each size of pieces."""
        found = []
        for name, piece in PIECES.items():
            depth = max(4, min(16, self._budget // piece))
            run = made(self._engine, self._file, nbytes, piece, depth)
            found.append(Contender(f"{kind} of {name}", partial(_repeat, run, times)))
        return found


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def main() -> None:
    """Print how long steps and their bounds took."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_option(parser)
    parser.add_argument("--elements", type=float, default=1e8, help="of all parameters")
    parser.add_argument("--layers", type=int, help="whole steps of a model of so many layers")
    parser.add_argument("--width", type=int, default=2560, help="of these")
    parser.add_argument("--in-a-row", type=int, default=4, help="steps of these")
    parser.add_argument("--format", choices=FORMATS, default="float32")
    parser.add_argument("--device", default="cpu", help="of the parameters")
    parser.add_argument("--share", type=float, default=8, help="state is so many times the budget")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--loop", choices=PIECES, help="pieces of loops, if only one kind")
    parser.add_argument("--company", action="store_true", help="Python computes beside steps")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    described = introduced(options.device)
    kwargs = dict(FORMATS[options.format])
    dtype = kwargs.pop("dtype")
    model = None
    if options.layers is None:
        params = flat_params(int(options.elements), dtype, options.device)
    else:
        size = Size(layers=options.layers, width=options.width)
        model = make_model(size, options.device, dtype)
        params = list(model.parameters())
    where = {"device": "nvme", "nvme_fraction": 1.0}
    state = estimate(params, **where, memory_budget="64GiB", **kwargs).disk_bytes
    budget = int(state / options.share)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.path))
        where |= {"nvme_path": folder, "memory_budget": budget}
        made = partial(OffloadOptimizer, params, DeepSpeedCPUAdam, lr=1e-6, **kwargs)
        disk = Disk(folder, state, budget, stack)
        times = 1 if model is None else options.in_a_row
        if model is not None:
            on_disk = stack.enter_context(made(model=model, **where))
            steps, alone = whole_steps(model, size, options.device, times)
            contenders = [
                Contender("steps", partial(steps, on_disk)),
                Contender("backwards", partial(alone, on_disk)),
            ]
        else:
            on_disk = stack.enter_context(made(**where))
            durable = stack.enter_context(made(**where, durable=True))
            durable.step()
            durable.commit()
            committed = durable.stats()["bytes_committed"]
            contenders = [
                Contender("on disk", stepping(on_disk)),
                Contender("durable", stepping(durable)),
                Contender("in memory", stack.enter_context(made()).step),
                Contender("commit", durable.commit),
                *disk.contenders("writes", writes, committed),
            ]
        if options.company:
            step = stepping(on_disk) if model is None else partial(steps, on_disk)
            contenders = [
                Contender("alone", step),
                Contender("beside a thread", beside_thread(step, stack)),
                Contender("beside a process", beside_process(step, stack)),
            ]
        contenders += disk.contenders("loop", loop, state, times)
        if options.loop is not None:
            contenders = [c for c in contenders if " of " not in c.name or options.loop in c.name]
        with tqdm(total=options.rounds) as progress:
            timings = measure(contenders, options.device, options.rounds, progress, warm_up=1)
        work = f"{options.format}, {state / 2**30:.2f} GiB of state, {budget >> 20} MiB"
        if model is None:
            work += f", {committed / 2**30:.2f} GiB in a commit"
        elements = sum(param.numel() for param in params)
        result = Result(work, torch.get_num_threads(), elements, 2 * state * times, timings)
        show(result)
        print(
            {
                key: value
                for key, value in on_disk.stats().items()
                if "read" in key or "written" in key
            }
        )
    keep(options.save, [result], described)


if __name__ == "__main__":
    main()
