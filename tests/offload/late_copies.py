"""Copies that come as late as anybody can see, so that whoever does not wait for them is wrong.

On the CPU a copy is made when somebody waits for it or for a later one, and events say so only
after they were asked some times. On CUDA the streams of copies sleep before each.
"""

import random
import threading
from collections import deque

import torch

from deepspeed_ext.offload import gradient_intake
from deepspeed_ext.offload.copies import CopyStreams

CYCLES = 1_000_000  # about half a millisecond of a GPU


def be_late(monkeypatch, device, seed=0, most=4):
    """Let the copies of optimizers that are made from now on be late.

    Args:
        monkeypatch: until when.
        device: "cpu", or one of CUDA.
        seed: of how often events are asked in vain.
        most: how often that may be, at most.
    """
    if device == "cpu":
        draw = random.Random(seed)
        monkeypatch.setattr(
            gradient_intake, "CopyStreams", lambda d: LateStreams(d, lambda: draw.randint(0, most))
        )
    else:
        monkeypatch.setattr(gradient_intake, "CopyStreams", SleepyStreams)


class SleepyStreams(CopyStreams):
    """Copy streams that sleep before each copy."""

    def _run(self, copies, stream, name):
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
        return super()._run(copies, stream, name)


class Stream:
    """Things to be done in their order, when somebody waits for them."""

    def __init__(self):
        self._lock = threading.RLock()
        self._given, self._todo, self.done = 0, deque(), 0

    def give(self, run, in_vain):
        """Return the event of something that is to be done."""
        with self._lock:
            self._todo.append(run)
            self._given += 1
            return Event(self, self._given, in_vain)

    def catch_up(self, number=None):
        """Do all up to that number, or all there is."""
        with self._lock:
            while self._todo and (number is None or self.done < number):
                self._todo.popleft()()
                self.done += 1


class Event:
    """One that says so often that it is not over, if nobody waits for it."""

    def __init__(self, stream, number, in_vain):
        self._stream, self._number, self._in_vain = stream, number, in_vain

    def query(self):
        """As that of CUDA."""
        if self._stream.done < self._number and self._in_vain > 0:
            self._in_vain -= 1
            return False
        self.synchronize()
        return True

    def synchronize(self):
        """As that of CUDA."""
        self._stream.catch_up(self._number)


class LateStreams(CopyStreams):
    """Copy streams of the CPU; the current one is whoever calls."""

    def __init__(self, device, draw):
        super().__init__(device)
        self._draw = draw
        self._late_out, self._late_back, self._now = Stream(), Stream(), Stream()

    def event_now(self):
        """Return an event that is over when it was asked often enough."""
        return self._now.give(lambda: None, self._draw())

    def fetch(self, copies):
        """Copy later."""
        return self._late_out.give(_later(copies), self._draw())

    def hold_back(self):
        """Copy now."""
        self._late_out.catch_up()

    def send(self, copies, after):
        """Copy later, and not before the event."""
        copy = _later(copies)

        def run():
            if after is not None:
                after.synchronize()
            copy()

        event = self._late_back.give(run, self._draw())
        self._returning.append(event)
        return event

    def fingerprint_sent(self, parts, rows, others):
        """Fingerprint later, behind the copies."""
        there = torch.zeros(len(parts) if others is None else len(others), dtype=torch.int64)

        def run():
            there.copy_(super(LateStreams, self).fingerprint_sent(parts, rows, others)[0])

        return there, self._late_back.give(run, self._draw())

    def await_on_stream(self, event, awaited):
        """Wait."""
        event.synchronize()


def _later(copies):
    """Return what copies; writes count from now on, as those that a stream is given do."""
    for target, _ in copies:
        torch.autograd.graph.increment_version(target)

    def run():
        with torch._C.DisableTorchFunctionSubclass():  # no Python is told of what a stream does
            for target, source in copies:
                target.data.copy_(source.detach())

    return run
