"""Ways to do a piece of disk work that take turns, and what is expected of ours."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.results import Result, Timing
from deepspeed_ext.io.tuning.raw_device import MOST_ACHIEVED

_WARM_UP = 1


@dataclass(frozen=True)
class Bar:
    """What is expected of ours.

    Args:
        rivals: groups of other ways. The best of each counts, and of these the slowest.
        times: how many times as fast as that ours shall be at least.
        of_cpu: compare seconds of the CPU, of which ours shall take this part at most.
        is_ceiling: nothing can be faster than the rivals, which only read or write. Where ours is
            all the same, something else was measured.
    """

    rivals: tuple[tuple[str, ...], ...]
    times: float
    of_cpu: bool = False
    is_ceiling: bool = False


@dataclass(frozen=True)
class Spent:
    """What one go at a piece of work took: seconds, and seconds of this process on the CPU."""

    seconds: float
    cpu: float = 0.0


Way = Callable[[], Spent]


@dataclass(frozen=True)
class Row:
    """A piece of work; the first way is ours.

    Args:
        title: what is done.
        nbytes: that each way moves.
        ways: by name; each does the work and says what that took.
        bars: what is expected.
    """

    title: str
    nbytes: int
    ways: Mapping[str, Way]
    bars: Sequence[Bar]


def timed(run: Callable[[], object]) -> Way:
    """Return a way that takes the time of a call."""

    def way() -> Spent:
        cpu, started = _cpu_seconds(), time.perf_counter()
        run()
        return Spent(time.perf_counter() - started, _cpu_seconds() - cpu)

    return way


def measure(work: str, row: Row, rounds: int, progress: "tqdm[None]") -> Result:
    """Let the ways take turns; another one begins each round."""
    seconds: dict[str, list[float]] = {name: [] for name in row.ways}
    cpu: dict[str, list[float]] = {name: [] for name in row.ways}
    names = list(row.ways)
    for first in range(-_WARM_UP, rounds):
        begin = first % len(names)
        for name in (*names[begin:], *names[:begin]):
            spent = row.ways[name]()
            if first >= 0:
                seconds[name].append(spent.seconds)
                cpu[name].append(spent.cpu)
        if first >= 0:
            progress.update()
    timings = {name: Timing.of(values) for name, values in seconds.items()}
    used = {name: Timing.of(values) for name, values in cpu.items()}
    verdicts = [_verdict(bar, used if bar.of_cpu else timings) for bar in row.bars]
    # Programs beside this one have seconds of their own.
    ours = {name: timing for name, timing in used.items() if timing.most}
    return Result(work, 0, 0, row.nbytes, timings, (), ours, row.title, verdicts)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _verdict(bar: Bar, timings: Mapping[str, Timing]) -> str:
    ours = next(iter(timings.values())).median
    groups = [[name for name in group if name in timings] for group in bar.rivals]
    best = [min(group, key=lambda name: timings[name].median) for group in groups if group]
    if not best:
        return "nothing to compare with on this machine"
    rival = max(best, key=lambda name: timings[name].median)
    theirs = timings[rival].median
    if bar.of_cpu:
        word = "reached" if ours <= bar.times * theirs else "MISSED"
        return f"{ours / theirs:.2f}x the CPU of {rival}, at most {bar.times:.2f}x: {word}"
    word = "reached" if bar.times * ours <= theirs else "MISSED"
    if bar.is_ceiling and theirs > MOST_ACHIEVED * ours:
        word = f"NOT TO BE TRUSTED, it is more than {MOST_ACHIEVED:.0%} of what the device does"
    return f"{theirs / ours:.2f}x as fast as {rival}, at least {bar.times:.2f}x: {word}"
