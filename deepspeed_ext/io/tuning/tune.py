"""Find the engine's settings that suit a device, in seconds: in stages, not the whole grid.

Each stage changes one thing about the best settings so far: the backend, the queue depth, the block
size, the threads. Its contenders take turns, so that a device that slows down is as unfair to one
as to the other. In the last stage the finalists meet the defaults and the raw device.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import BACKENDS, Settings
from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.io.tuning import raw_device
from deepspeed_ext.io.tuning.rates import Rates, best_of, compare
from deepspeed_ext.io.tuning.settings import Device, device_of, tuned

__all__ = ["Report", "tune", "tuned"]

_CHUNK = 8 << 20  # bytes of one request; a multiple of every block size that is tried
_SMALLEST_FILE = 64 << 20
_MOST_IN_FLIGHT = 64 << 20  # bytes: more only makes a slow device take long to finish
_BLOCK_SIZES = (1 << 20, 256 << 10, 512 << 10, 2 << 20, 4 << 20)
_DEPTHS = (32, 8, 16, 64, 128)
_THREADS = (1, 2, 4)
_ROUNDS, _LAST_ROUNDS = 2, 3
_LAST_LONGER = 2  # times as long as the others: other tools take a moment to start
_FINALISTS = 5
_SETUPS = len(BACKENDS) + len(_DEPTHS) + len(_BLOCK_SIZES) + len(_THREADS)
_TRIALS = 2 * (_ROUNDS * _SETUPS + _LAST_ROUNDS * _LAST_LONGER * _FINALISTS)  # in two directions


@dataclass(frozen=True)
class Report:
    """What `tune` found out.

    Args:
        device: what it is about.
        direct: whether the file system lets data pass by the page cache.
        file_bytes: the size of the test file.
        best: the settings that it recommends.
        finalists: the best settings and others, measured in turns, the default ones included.
        raw: the device without this engine, measured in the same rounds, by name of the tool.
        refused: the backends that do not work here, with the errno of each.
    """

    device: Device
    direct: bool
    file_bytes: int
    best: Settings
    finalists: dict[Settings, Rates]
    raw: dict[str, Rates]
    refused: dict[str, int]

    @property
    def achieved(self) -> Rates | None:
        """The best settings' rates as parts of the raw device's; None when that is unknown."""
        read = max((rates.read for rates in self.raw.values()), default=0)
        write = max((rates.write for rates in self.raw.values()), default=0)
        got = self.finalists[self.best]
        return Rates(got.read / read, got.write / write) if read and write else None

    @property
    def trusted(self) -> bool:
        """Whether the best settings' rates are such as the raw device allows."""
        got = self.achieved
        return got is None or max(got.read, got.write) <= raw_device.MOST_ACHIEVED


def tune(
    path: str | os.PathLike[str],
    seconds: float = 20.0,
    size: int = 1 << 30,
    progress: Callable[[float], None] = lambda part: None,
) -> Report:
    """Find the settings of AsyncIO that read and write fastest in a folder.

    About half of the time it writes, always to the same test file, which has no name and is gone in
    the end, whatever happens.

    Args:
        path: a folder on the device.
        seconds: how long it may take; a slow device takes somewhat longer.
        size: of the test file in bytes; half of the free space when that is less.
        progress: called with the part that is done, from 0 to 1.

    Returns:
        What it found. Nothing is saved.

    Raises:
        OSError: the folder cannot be written, or has too little space.
        TypeError: path is no path.
        ValueError: path is empty, or `seconds` or `size` is too small.
    """
    if seconds <= 0:
        raise ValueError(f"tune: seconds is {seconds}, expected more than 0")
    if size < _SMALLEST_FILE:
        raise ValueError(f"tune: size is {size}, expected at least {_SMALLEST_FILE} bytes")
    path = path_text("tune", path)
    probed = native().probe_backends()
    started = time.monotonic()  # not before: the engine may have had to be compiled
    file = native().File.scratch(path)
    try:
        search = _Search(file, _fitting(file, size, path), started, seconds, progress)
        best, finalists, raw = search.run([name for name in BACKENDS if probed[name] == 0])
    finally:
        file.close()
    refused = {name: code for name, code in probed.items() if code}
    return Report(device_of(path), search.direct, search.size, best, finalists, raw, refused)


def _fitting(file: Any, size: int, path: str) -> int:
    """Return the size of a test file that leaves half of the free space to others."""
    free = file.free_bytes()
    fitting: int = min(size, free // 2) // _CHUNK * _CHUNK
    if fitting < _SMALLEST_FILE:
        text = f"tune: {path} has {free} bytes free, expected {2 * _SMALLEST_FILE}"
        raise OSError(errno.ENOSPC, f"{text}; name a folder with more space")
    return fitting


class _Search:
    """One run of the tuner: a test file, memory for it, and a clock."""

    def __init__(
        self,
        file: Any,
        size: int,
        started: float,
        seconds: float,
        progress: Callable[[float], None],
    ) -> None:
        self.size = size
        self.direct: bool = file.direct
        self._file = file
        self._pages = native().Pages(min(size, 2 * _MOST_IN_FLIGHT))
        memoryview(self._pages)[:] = os.urandom(_CHUNK) * (self._pages.nbytes // _CHUNK)
        self._progress = progress
        self._done = 0
        self._longer = 1
        self._trial_seconds = 0.0
        file.allocate(0, size)
        # Written once before anything is timed: the first write of a block costs more than others.
        self._trial(Settings(backend="threads"), write=True, size=size)
        file.sync()
        self._deadline = started + seconds
        self._trial_seconds = max(0.01, 0.95 * (self._deadline - time.monotonic()) / _TRIALS)

    def run(
        self, backends: Sequence[str]
    ) -> tuple[Settings, dict[Settings, Rates], dict[str, Rates]]:
        """Go through the stages; return the best settings, the finalists and the raw device."""
        best = self._stage([Settings(backend=name) for name in backends])
        first = best
        best = self._stage(_variants(best, "queue_depth", _DEPTHS))
        best = self._stage(_variants(best, "block_size", _BLOCK_SIZES))
        best = self._stage(_variants(best, "threads", _THREADS))
        memory = memoryview(self._pages)
        ways = raw_device.ways_to_measure(self._file.fileno(), self.size, memory)
        contenders: list[Settings | str] = [*dict.fromkeys([first, best]), *ways]
        self._longer = _LAST_LONGER

        def measure(contender: Settings | str) -> Rates:
            if isinstance(contender, Settings):
                return self._rates(contender)
            self._advance(2 * self._longer)
            return ways[contender](self._trial_seconds * self._longer)

        found = compare(contenders, measure, _LAST_ROUNDS, self._is_over)
        finalists = {c: rates for c, rates in found.items() if isinstance(c, Settings)}
        self._progress(1.0)
        return best_of(finalists), finalists, {w: r for w, r in found.items() if isinstance(w, str)}

    def _stage(self, contenders: Sequence[Settings]) -> Settings:
        if len(contenders) == 1 or self._is_over():
            return contenders[0]
        return best_of(compare(contenders, self._rates, _ROUNDS, self._is_over))

    def _rates(self, settings: Settings) -> Rates:
        return Rates(self._trial(settings, write=False), self._trial(settings, write=True))

    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def _advance(self, trials: int) -> None:
        self._done += trials
        self._progress(min(1.0, self._done / _TRIALS))

    def _trial(self, settings: Settings, *, write: bool, size: int = 0) -> float:
        """Move bytes for a moment, or `size` of them; return how many in a second."""
        try:
            engine = native().Engine(**asdict(settings))
        except OSError:  # more than this system allows, such as aio-max-nr
            if size:
                raise
            return 0.0
        try:
            token = engine.register(self._pages.address, self._pages.nbytes)
            rate = self._move(engine, settings, write=write, size=size)
            engine.unregister(token)
        finally:
            engine.close()  # and nothing is on its way any more
        if not size:
            self._advance(self._longer)
        return rate

    def _move(self, engine: Any, settings: Settings, *, write: bool, size: int) -> float:
        slots = self._pages.nbytes // _CHUNK
        wanted = 2 * _in_flight(settings) // _CHUNK
        waiting: deque[Any] = deque()
        limit = self._trial_seconds * self._longer
        moved = 0
        started = time.perf_counter()
        while waiting or not moved:
            over = moved >= size if size else time.perf_counter() - started >= limit
            while len(waiting) < min(slots, max(4, wanted)) and not (over and moved):
                address = self._pages.address + moved // _CHUNK % slots * _CHUNK
                place = (address, _CHUNK, moved % self.size)
                waiting.append(engine.submit(self._file, *place, write=write, truncate=False))
                moved += _CHUNK
                over = moved >= size if size else over
            request = waiting.popleft()
            while not request.wait(1.0):  # in slices, so that Ctrl-C gets through
                pass
            request.check()
        return moved / (time.perf_counter() - started)


def _in_flight(settings: Settings) -> int:
    return settings.block_size * settings.queue_depth * settings.threads


def _variants(best: Settings, name: str, values: Iterable[int]) -> list[Settings]:
    """Return the best settings so far, then others with another value of one of them."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    others = [replace(best, **change) for change in changes]
    return list(dict.fromkeys([best, *(s for s in others if _in_flight(s) <= _MOST_IN_FLIGHT)]))
