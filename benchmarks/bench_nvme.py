"""Steps with state on disk: `python -m benchmarks.bench_nvme`, beside what bounds them.

A step reads all state and writes all state. Nobody is faster than the slower of the step in host
memory and of a loop that reads and writes as many bytes at the same time, at the best of some
depths and sizes. A commit writes the weights, beside which stands a loop that writes as many bytes.
All take turns in one process.
"""

import argparse
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch.nn import Parameter
from tqdm import tqdm

from benchmarks.harness import Contender, measure
from benchmarks.results import Result, add_option, introduced, keep, show
from deepspeed_ext.io import AsyncIO, File, PinnedBuffer
from deepspeed_ext.offload import OffloadOptimizer, estimate
from deepspeed_ext.optim import DeepSpeedCPUAdam

TENSORS = 24
FORMATS = {
    "float32": {"dtype": torch.float32},
    "compact": {"dtype": torch.bfloat16, "state_dtype": torch.uint8, "master": "remainder"},
}
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


def main() -> None:
    """Print how long steps and their bounds took."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_option(parser)
    parser.add_argument("--elements", type=float, default=1e8, help="of all parameters")
    parser.add_argument("--format", choices=FORMATS, default="float32")
    parser.add_argument("--device", default="cpu", help="of the parameters")
    parser.add_argument("--share", type=float, default=8, help="state is so many times the budget")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    described = introduced(options.device)
    kwargs = dict(FORMATS[options.format])
    dtype = kwargs.pop("dtype")
    size = int(options.elements) // TENSORS // 4096 * 4096
    params = [
        Parameter(torch.zeros(size, dtype=dtype, device=options.device)) for _ in range(TENSORS)
    ]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    state = sum(
        estimate(
            params, nvme_fraction=1.0, device="nvme", memory_budget="64GiB", **kwargs
        ).disk.values()
    )
    with ExitStack() as stack:
        made = partial(OffloadOptimizer, params, DeepSpeedCPUAdam, lr=1e-6, **kwargs)
        where = {"device": "nvme", "nvme_path": options.path, "nvme_fraction": 1.0}
        budget = int(state / options.share)
        on_disk = stack.enter_context(made(**where, memory_budget=budget))
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.path))
        where["nvme_path"] = folder
        durable = stack.enter_context(made(**where, memory_budget=budget, durable=True))
        durable.step()
        durable.commit()
        committed = durable.stats()["bytes_committed"]
        in_memory = stack.enter_context(made())
        engine = stack.enter_context(AsyncIO())
        file = File.scratch(str(options.path))
        stack.callback(file.close)
        file.allocate(0, state)
        contenders = [
            Contender("on disk", stepping(on_disk)),
            Contender("durable", stepping(durable)),
            Contender("commit", durable.commit),
            Contender("in memory", in_memory.step),
        ]
        for name, piece in PIECES.items():
            depth = max(4, min(16, budget // piece))
            contenders.append(Contender(f"loop of {name}", loop(engine, file, state, piece, depth)))
            write = writes(engine, file, committed, piece, depth)
            contenders.append(Contender(f"writes of {name}", write))
        with tqdm(total=options.rounds) as progress:
            timings = measure(contenders, options.device, options.rounds, progress)
        work = f"{options.format}, {state / 2**30:.2f} GiB of state, {budget >> 20} MiB"
        work += f", {committed / 2**30:.2f} GiB in a commit"
        result = Result(work, torch.get_num_threads(), size * TENSORS, 2 * state, timings)
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
