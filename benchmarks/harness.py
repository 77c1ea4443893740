"""Measure contenders that take turns in one process, and show them beside each other."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import deepspeed_ext

ROUNDS = 15
_WARM_UP = 2
_PAUSE = 0.01  # seconds: waiting OpenMP threads spin for a while, which would slow the next one


@dataclass(frozen=True)
class Contender:
    """One way to do a piece of work."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The seconds that all rounds of a contender took."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        return Timing(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Result:
    """One piece of work, done by all contenders; the first is ours."""

    work: str
    threads: int  # 0 on CUDA
    elements: int
    bytes_moved: int
    timings: dict[str, Timing]

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as fast as each other contender ours is."""
        ours, *others = self.timings.items()
        return {name: timing.median / ours[1].median for name, timing in others}


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
    contenders: Sequence[Contender], device: str, rounds: int, progress: "tqdm[None]"
) -> dict[str, Timing]:
    """Let the contenders take turns; another one begins each round.

    Args:
        contenders: none shares tensors with another.
        device: "cpu" or "cuda".
        rounds: how often each is timed.
        progress: advanced by one for each round.
    """
    seconds_of = seconds_on_cuda if device == "cuda" else seconds_on_cpu
    for contender in contenders:
        for _ in range(_WARM_UP):
            contender.run()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for first in range(rounds):
        first %= len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            seconds[contender.name].append(seconds_of(contender.run))
        progress.update()
    return {name: Timing.of(values) for name, values in seconds.items()}


def environment(device: str) -> dict[str, str]:
    """Say what the figures depend on."""
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch": torch.__version__,
        "deepspeed_ext": deepspeed_ext.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show(result: Result) -> None:
    """Print one piece of work as a table of 80 columns; tqdm's bar stays below it."""
    threads = f", {result.threads} thread{'s' * (result.threads > 1)}" * bool(result.threads)
    each = result.bytes_moved / max(result.elements, 1)
    lines = [
        f"\n{result.work}{threads}",
        f"{result.elements:,} elements, {each:g} bytes each",
        f"{'':33}{'ms':>9}  {'least .. most':^19}{'GB/s':>8}{'ours is':>9}",
    ]
    for name, timing in result.timings.items():
        spread = f"{1e3 * timing.least:.3f} .. {1e3 * timing.most:.3f}"
        rate = result.bytes_moved / timing.median / 1e9
        ratio = f"{result.ratios[name]:.2f}x" if name in result.ratios else ""
        lines.append(f"{name:33}{1e3 * timing.median:9.3f}  {spread:^19}{rate:8.1f}{ratio:>9}")
    tqdm.write("\n".join(lines))


def save(path: Path, described: dict[str, str], results: Sequence[Result]) -> None:
    """Write everything as JSON; times are in seconds."""
    rows = [asdict(result) | {"ours_is_times": result.ratios} for result in results]
    path.write_text(json.dumps({"environment": described, "results": rows}, indent=1) + "\n")
