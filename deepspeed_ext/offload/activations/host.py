"""Host memory as the place of what autograd saves: pinned, and a stream for each device."""

import os
import sys

import torch
from torch import Tensor

from deepspeed_ext.captures import beside_captures
from deepspeed_ext.io import PinnedPool

Event = torch.cuda.Event
Stream = torch.cuda.Stream


class CopyLane:
    """Copies between one device and host memory, all in the order in which they are queued.

    So memory of the pool that is lent anew is written behind the copies that read it. On the CPU
    a copy is over when the call returns, and there are neither streams nor events.

    Args:
        device: where the tensors are that leave and come back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process = os.getpid()
        self._stream = Stream(device) if device.type == "cuda" else None
        self._pool = PinnedPool()
        self._most_in_use = 0

    def memory(self, nbytes: int) -> Tensor:
        """Return host memory, as bytes."""
        made = self._pool.take(nbytes).tensor()
        stats = self._pool.stats()
        self._most_in_use = max(self._most_in_use, stats["in_use"])
        # Sizes that change from step to step would otherwise leave memory behind with each.
        if stats["pinned_bytes"] > self._most_in_use + self._most_in_use // 4:
            self.finish()  # or a copy may be under way to what is freed
            self._pool.trim()
        return made

    def current_stream(self) -> Stream | None:
        """Return the current stream of the device."""
        return None if self._stream is None else torch.cuda.current_stream(self.device)

    def copy(self, target: Tensor, source: Tensor) -> Event | None:
        """Copy bytes behind what the current stream was given so far; nobody waits for it."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = Event()
        event.record(self._stream)
        return event

    def is_captured(self) -> bool:
        """Tell whether what the current stream is given now becomes part of a graph."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def hold_back(self, stream: Stream | None, event: Event | None, is_of_graph: bool) -> None:
        """Let a stream wait for a copy; not in a forked child, which has neither.

        Args:
            stream: which.
            event: when the copy is over.
            is_of_graph: the copy is part of a graph that was captured.
        """
        if stream is None or event is None or os.getpid() != self._process:
            return
        with torch.cuda.stream(stream):
            outside = self.is_captured() and not is_of_graph
        if not outside:
            stream.wait_event(event)
            return
        with beside_captures():  # a graph cannot wait for a copy that is no part of it
            event.synchronize()

    def finish(self) -> None:
        """Wait until all copies are over."""
        if self._stream is not None and os.getpid() == self._process:
            self._stream.synchronize()

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # a module that is gone is None
            return
        if "_most_in_use" in self.__dict__:
            with beside_captures():
                self.finish()  # before the pool lets go of what they read and write


class CopyOut:
    """A copy of bytes to host memory that is under way, or over.

    What is copied is held until then: whoever drops it lets the stream wait that it was made on.

    Attributes:
        source: what is copied, on its device; None: it has been let go of.
    """

    def __init__(self, lane: CopyLane, source: Tensor, target: Tensor) -> None:
        self.source: Tensor | None = None
        self._lane = lane
        self._stream = lane.current_stream()
        self._is_of_graph = lane.is_captured()
        self._event = lane.copy(target, source)
        self.source = source

    def has_ended(self) -> bool:
        """Tell whether it is over, and let go of what was copied if so."""
        if self._event is None or self._event.query():
            self._event = self.source = None
            return True
        return False

    def let_go(self) -> None:
        """Let go of what is copied: the stream that made it goes on when that is over."""
        if self.source is not None:
            self._lane.hold_back(self._stream, self._event, self._is_of_graph)
            self._event = self.source = None

    def __del__(self) -> None:
        self.let_go()


class CopyBack:
    """Bytes that come back from host memory, or are there.

    Their memory is of the current stream's pool, so the copy comes behind whatever used it before.

    Attributes:
        memory: on the device; it may be read behind `wait`.
    """

    def __init__(self, lane: CopyLane, source: Tensor) -> None:
        self._event: Event | None = None
        self._lane = lane
        self._stream = lane.current_stream()
        self._is_of_graph = lane.is_captured()
        self.memory = torch.empty(source.nbytes, dtype=torch.uint8, device=lane.device)
        self._event = lane.copy(self.memory, source)

    def is_of_current_stream(self) -> bool:
        """Tell whether the current stream may use the memory without a word to the allocator."""
        return self._stream == self._lane.current_stream()

    def wait(self) -> None:
        """Let the stream wait for them that was the current one."""
        event, self._event = self._event, None
        self._lane.hold_back(self._stream, event, self._is_of_graph)

    def __del__(self) -> None:
        self.wait()  # or the memory would be used again while something is copied to it


class HostBytes:
    """Bytes of a device in host memory.

    Attributes:
        leaving: the copy to there.
    """

    def __init__(self, lane: CopyLane, source: Tensor) -> None:
        self._lane = lane
        self._memory = lane.memory(source.nbytes)
        self.leaving = CopyOut(lane, source, self._memory)

    def fetch(self) -> CopyBack:
        """Begin to copy them to new memory of the device."""
        return CopyBack(self._lane, self._memory)


class HostPlace:
    """Keeps bytes in host memory."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, CopyLane] = {}

    def take(self, source: Tensor) -> HostBytes:
        """Begin to copy bytes of a device."""
        lane = self._lanes.get(source.device)
        if lane is None:
            lane = self._lanes[source.device] = CopyLane(source.device)
        return HostBytes(lane, source)
