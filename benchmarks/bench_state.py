"""Loading and copying state, ours and torch's: `python -m benchmarks.bench_state`, on the CPU."""

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import Parameter
from tqdm import tqdm

from benchmarks.harness import ROUNDS, Contender, measure
from benchmarks.results import Result, add_option, introduced, keep, show
from deepspeed_ext.optim import DeepSpeedCPUAdam

PARAMS, SHAPE = 10_000, (16, 16)
CLASSES = {"DeepSpeedCPUAdam": DeepSpeedCPUAdam, "torch AdamW": torch.optim.AdamW}


def stepped(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer that has state."""
    params = [Parameter(torch.zeros(SHAPE)) for _ in range(PARAMS)]
    optimizer = kind(params, lr=1e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def loading(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    saved = copy.deepcopy(optimizer.state_dict())
    return partial(optimizer.load_state_dict, saved)


def copying(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return partial(copy.deepcopy, optimizer)


def main() -> None:
    """Let both take turns at each piece of work, and print how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_option(parser)
    options = parser.parse_args()
    described = introduced("cpu")
    elements = PARAMS * torch.Size(SHAPE).numel()
    results = []
    workloads = {"load_state_dict": loading, "deepcopy": copying}
    try:
        with tqdm(total=ROUNDS * len(workloads)) as progress:
            for name, make in workloads.items():
                contenders = [
                    Contender(title, make(stepped(kind))) for title, kind in CLASSES.items()
                ]
                timings = measure(contenders, "cpu", ROUNDS, progress)
                work = f"{name} of {PARAMS:,} x {SHAPE[0]}x{SHAPE[1]}"
                results.append(
                    Result(work, torch.get_num_threads(), elements, 8 * elements, timings)
                )
                show(results[-1])
    finally:  # what is measured is kept, whatever fails after it
        keep(options.save, results, described)


if __name__ == "__main__":
    main()
