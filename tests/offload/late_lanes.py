"""Copies of saved tensors that come as late as anybody can see.

On the CPU a copy is made when somebody waits for it or for a later one; until then its target has
other bytes, and whoever lets go of source or target is told. On CUDA the stream of copies sleeps.
"""

import gc
import threading
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.offload.activations import host

CYCLES = 300_000  # about a sixth of a millisecond of a GPU


class Weak:
    """A tensor whose memory is not held."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.begin, self.nbytes = tensor.storage_offset(), tensor.nbytes

    def tensor(self):
        """Return it, or None if its memory is gone."""
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        made = torch.empty(0, dtype=torch.uint8)
        return made.set_(storage, self.begin, (self.nbytes,), (1,))


class Held:
    """One whose memory is held."""

    def __init__(self, tensor):
        self._tensor = tensor

    def tensor(self):
        return self._tensor


class Event:
    def __init__(self, lane, number, in_vain):
        self._lane, self._number, self._in_vain = lane, number, in_vain

    def query(self):
        if self._lane.done < self._number and self._in_vain:
            self._in_vain -= 1
            return False
        self._lane.catch_up(self._number)
        return True


class LateLane(host.CopyLane):
    """Of the CPU.

    Attributes:
        most_back: most bytes that were back, or on their way, and still held.
    """

    def __init__(self, device, in_vain, failures):
        super().__init__(device)
        self._todo, self._given, self.done = deque(), 0, 0
        self._lock = threading.RLock()
        self._in_vain, self._failures = in_vain, failures
        self._back, self.most_back = [], 0
        self._on_host = set()  # addresses

    def memory(self, nbytes):
        made = super().memory(nbytes)
        self._on_host.add(made.data_ptr())
        return made

    def current_stream(self):
        return "the only one"

    def copy(self, target, source):
        # What is lent anew is written behind this: so it may be let go of.
        ends = [Held(t) if t.data_ptr() in self._on_host else Weak(t) for t in (target, source)]
        if source.data_ptr() in self._on_host:
            self._back = [weak for weak in self._back if not weak.storage.expired()]
            self._back.append(Weak(target))
            self.most_back = max(self.most_back, sum(weak.nbytes for weak in self._back))
        target.fill_(0xFF)
        with self._lock:
            self._todo.append(ends)
            self._given += 1
            return Event(self, self._given, self._in_vain)

    def hold_back(self, stream, event, is_of_graph):
        if event is not None:
            self.catch_up(event._number)

    def finish(self):
        self.catch_up(self._given)

    def catch_up(self, number):
        with self._lock:  # whoever drops a graph lets go of copies, in any thread
            while self.done < number:
                ends = self._todo.popleft()
                self.done += 1
                target, source = (weak.tensor() for weak in ends)
                if target is None or source is None:
                    self._failures.append("memory was let go of while it was copied")
                else:
                    target.copy_(source)


class SleepyLane(host.CopyLane):
    """Of CUDA."""

    def copy(self, target, source):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)
        return super().copy(target, source)


def be_late(monkeypatch, device, in_vain=10**9):
    """Let copies of saved tensors be late; return what goes wrong, and the lanes.

    Args:
        monkeypatch: until when.
        device: "cpu" or "cuda".
        in_vain: how often an event is asked before it says that a copy is over.
    """
    failures, lanes = [], []

    def lane(where):
        made = LateLane(where, in_vain, failures) if device == "cpu" else SleepyLane(where)
        lanes.append(made)
        return made

    monkeypatch.setattr(host, "CopyLane", lane)
    gc.collect()
    return failures, lanes
