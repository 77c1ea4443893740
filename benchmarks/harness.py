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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after some whole rounds.

    Args:
        timings: of these rounds.
        rounds: how many they are.
    """

    def __init__(self, timings: dict[str, Timing], rounds: int) -> None:
        super().__init__()
        self.timings, self.rounds = timings, rounds


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

    Raises:
        Interrupted: by Ctrl-C, with the rounds that were whole.
    """
    seconds_of = seconds_on_cuda if device == "cuda" else seconds_on_cpu
    for contender in contenders:
        for _ in range(warm_up):
            contender.run()
    done: list[dict[str, float]] = []
    try:
        for first in range(rounds):
            first %= len(contenders)
            turns = (*contenders[first:], *contenders[:first])
            done.append({contender.name: seconds_of(contender.run) for contender in turns})
            progress.update()
    except KeyboardInterrupt as error:
        if not done:
            raise
        raise Interrupted(_timings_of(contenders, done), len(done)) from error
    return _timings_of(contenders, done)


def _timings_of(
    contenders: Sequence[Contender], done: Sequence[dict[str, float]]
) -> dict[str, Timing]:
    names = [contender.name for contender in contenders]
    return {name: Timing.of([seconds[name] for seconds in done]) for name in names}
