"""Measure contenders that take turns in one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from benchmarks.results import Timing

ROUNDS = 15
WARM_UP = 2
_PAUSE = 0.01  # seconds: waiting OpenMP threads spin for a while, which would slow the next one


@dataclass(frozen=True)
class Contender:
    """One way to do a piece of work; a ceiling only moves as many bytes."""

    name: str
    run: Callable[[], object]
    is_ceiling: bool = False


def seconds_on_cpu(run: Callable[[], object]) -> float:
    """Time one call that is over when it returns."""
    time.sleep(_PAUSE)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def seconds_on_cuda(run: Callable[[], object]) -> float:
    """Time what one call queues on an idle device, the host's part included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(
    contenders: Sequence[Contender],
    device: str,
    rounds: int,
    progress: "tqdm[None]",
    warm_up: int = WARM_UP,
) -> dict[str, Timing]:
    """Let the contenders take turns; another one begins each round.

    Args:
        contenders: none shares tensors with another.
        device: "cpu" or "cuda".
        rounds: how often each is timed.
        progress: advanced by one for each round.
        warm_up: how often each is called before.
    """
    seconds_of = seconds_on_cuda if device == "cuda" else seconds_on_cpu
    for contender in contenders:
        for _ in range(warm_up):
            contender.run()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for first in range(rounds):
        first %= len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            seconds[contender.name].append(seconds_of(contender.run))
        progress.update()
    return {name: Timing.of(values) for name, values in seconds.items()}
