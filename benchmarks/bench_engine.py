"""A step of the engine: `python -m benchmarks.bench_engine`, or started by torchrun.

A model of 0.5 M parameters on the CPU, whose step takes so little that what surrounds it shows. In
one process the rivals are a plain loop with the same optimizer and zero.shard by hand; in several,
started as `torchrun --nproc-per-node 2 -m benchmarks.bench_engine`, the latter in each stage. All
take turns of some steps in the same processes; a turn is over when all processes have ended it.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import deepspeed_ext
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from deepspeed_ext import zero
from deepspeed_ext.optim import DeepSpeedCPUAdam

_WIDTH, _BLOCKS, _ROWS = 256, 4, 64
_WARM_UP, _IN_A_ROW = 2, 5
_LR, _MAX_NORM = 1e-3, 1.0
Run = Callable[[Tensor], object]


class Block(nn.Module):
    """Two layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next x."""
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(_BLOCKS)))


def loop(made: nn.Module) -> Run:
    """Return a step as it is written by hand."""
    optimizer = DeepSpeedCPUAdam(made.parameters(), lr=_LR)

    def run(x: Tensor) -> None:
        made(x).square().mean().backward()
        optimizer.clip_and_step(_MAX_NORM)
        optimizer.zero_grad()

    return run


def engine(stage: int) -> Run:
    """Return a step of the engine."""
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "gradient_clipping": _MAX_NORM,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
    }
    made, *_ = deepspeed_ext.initialize(model=model(), config=config)

    def run(x: Tensor) -> None:
        made.backward(made(x).square().mean())
        made.step()

    return run


def measured(stage: int, rounds: int) -> Result:
    """Let all take turns; another one begins each round."""
    contenders = {"engine": engine(stage), "zero.shard": loop(zero.shard(model(), stage))}
    if dist.get_world_size() == 1:
        contenders["plain loop"] = loop(model())
    x = torch.randn(_ROWS, _WIDTH)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    name = f"a step of stage {stage}, {dist.get_world_size()} processes"
    for i in tqdm(range(-_WARM_UP, rounds), desc=name, disable=dist.get_rank() > 0 or None):
        first = i % len(names)
        for each in (*names[first:], *names[:first]):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(_IN_A_ROW):
                contenders[each](x)
            dist.barrier()
            if i >= 0:
                found[each].append((time.perf_counter() - begin) / _IN_A_ROW)
    timings = {name: Timing.of(seconds) for name, seconds in found.items()}
    notes = [
        f"{timings['engine'].median / timings[other].median:.3f} of the time of {other}"
        for other in names[1:]
    ]
    elements = sum(p.numel() for p in model().parameters())
    return Result(name, torch.get_num_threads(), elements, 0, timings, notes=notes)


def main() -> None:
    """Measure, and let the first process print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default="0,1,2,3", help="which, by commas")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process")
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_first = dist.get_rank() == 0
    described = introduced("cpu") if is_first else {}
    results = []
    for stage in map(int, options.stages.split(",")):
        results.append(measured(stage, options.rounds))
        if is_first:
            show(results[-1])
            keep(options.save, results, described)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
