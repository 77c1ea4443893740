"""What the tests of state on disk share: a disk that fails or waits at some request."""

import threading
from functools import partial

import pytest
import torch
from offload_cases import Pair
from optim_cases import F32
from torch.nn import Parameter

from deepspeed_ext.io import AsyncIO, File, Future

BUDGET = 2 << 20  # a ring of four slabs of 256 KiB
SLABS = 4
SHAPES = [(300, 301), (17,), (0,), (40_001,), (5, 7)]
PIECES = 8  # of their state, in float32


def few(device="cpu", dtype=F32):
    """Return parameters whose state has more pieces than the ring has slabs."""
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [Parameter(value.to(device, dtype)) for value in values]


def on_disk(path, **options):
    """Return a pair whose state is all on disk."""
    settings = {"nvme_path": path, "memory_budget": BUDGET, "nvme_fraction": 1.0}
    options.setdefault("params", few())
    return Pair(tier="nvme", **(settings | options))


class Disk:
    """Requests of all stores, from when it is made, that end well unless the test wants otherwise.

    Attributes:
        counts: of requests so far, by "read" and "write".
    """

    def __init__(self, monkeypatch, tmp_path):
        self.counts = {"read": 0, "write": 0}
        self._bad, self._held, self._first_held = {}, [], float("inf")
        empty = tmp_path / "empty"
        empty.touch()
        self._broken = File(str(empty), "read")  # it ends before each read, and takes no write
        for verb in self.counts:
            monkeypatch.setattr(AsyncIO, verb, self._watched(verb, getattr(AsyncIO, verb)))

    def fail(self, verb, after):
        """Let one request fail, after so many that do not, counted from now."""
        self._bad[verb] = self.counts[verb] + after

    def hold(self, after=0):
        """Begin no write from now on, but for so many, until `open`, or somebody waits for it."""
        self._first_held = self.counts["write"] + after

    def stop_holding(self):
        """Begin all others from now on."""
        self._first_held = float("inf")

    @property
    def held(self):
        """How many writes have not begun."""
        return sum(not one.begun() for one in self._held)

    def open(self):
        """Begin what was held, and hold nothing more."""
        self.stop_holding()
        for one in self._held:
            one.begin()
        self._held.clear()

    def _watched(self, verb, original):
        def request(engine, tensor, file, offset=0):
            number = self.counts[verb]
            self.counts[verb] += 1
            if number == self._bad.get(verb):
                file = self._broken
            begin = partial(original, engine, tensor, file, offset)
            if verb == "write" and number >= self._first_held:
                self._held.append(_Held(begin))
                return Future(self._held[-1], tensor)
            return begin()

        return request


class _Held:
    """A request that begins when the test says so, or is waited for, as a Future does."""

    def __init__(self, begin):
        self._begin, self._inner = begin, None
        self._lock = threading.Lock()

    def begin(self):
        with self._lock:
            self._inner = self._inner or self._begin()

    def wait(self, seconds):
        self.begin()
        return self._inner.wait(seconds)

    def done(self):
        return self._inner is not None and self._inner.done()

    def check(self):
        self._inner.check()

    def begun(self):
        return self._inner is not None

    def cancel(self):
        return False


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """Return the disk of this test."""
    return Disk(monkeypatch, tmp_path)
