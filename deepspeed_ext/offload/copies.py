"""Copies between a device and host memory, on streams of their own where the device has any."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.io import PinnedPool
from deepspeed_ext.ops.optimizers.fingerprint import fingerprints
from deepspeed_ext.torch_internals.dispatch import set_grad_mode

Event = torch.cuda.Event
Events = dict[torch.device, Event | None]  # by the device that has it
# What a timeline calls copies, transfers of a disk, and steps on the host.
OUT, BACK = "gradients out", "weights in"
FROM_DISK, TO_DISK = "state from disk", "state to disk"
SPECULATIVE, REQUESTED = "speculative steps", "requested steps"
# Weights of so many steps are queued for the device: what is wanted first may come last.
_MOST_RETURNING = 8


class Recorder(Protocol):
    """Takes note of what went on when."""

    def span(self, name: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Record what the current stream of a device is given meanwhile."""

    def note(self, name: str, begin: float, end: float) -> None:
        """Record what the host has done, by time.perf_counter."""


def sleep_until(device: torch.device) -> None:
    """Wait until all is done that the current stream of a device was given.

    Reading a result would wait, too, but keep a core busy that a step in host memory could use.
    """
    if device.type == "cuda":
        event = Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def await_copy(grad: Tensor | None) -> None:
    """Wait for a gradient whose copy to host memory the current stream has been given.

    FSDP2's CPUOffloadPolicy tells of gradients before they have arrived in torch 2.11; since 2.13
    it waits by itself.
    """
    if grad is not None and is_dtensor(grad) and local(grad).device.type == "cpu":
        sleep_until(torch.device(grad.device_mesh.device_type))


class Copy(NamedTuple):
    """Elements that go from one tensor to another one of the same shape."""

    target: Tensor
    source: Tensor


class CopyStreams:
    """The copy streams of the two directions between one device and host memory.

    On the CPU a copy is over when the call returns, and there are no events.

    Args:
        device: where the parameters are.

    Attributes:
        recorder: is told of copies, if there is one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorder: Recorder | None = None
        # Whoever gets memory again gets it behind the copies to it that nobody wants any more.
        self._pool = PinnedPool()
        self._returning: deque[Event] = deque()
        self._event_stream: int | None = None  # the stream of the last event_now
        self._out: torch.cuda.Stream | None = None
        self._back: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def event_now(self) -> Event | None:
        """Return an event of what the current stream has been given so far."""
        if self._out is None:
            return None
        event, stream = Event(), torch.cuda.current_stream(self.device)
        event.record(stream)
        self._event_stream = stream.cuda_stream
        return event

    def staged(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return host memory to fetch these to, the widest elements first: so all are aligned."""
        buffer = self._pool.take(sum(source.nbytes for source in sources)).tensor()
        views: dict[int, Tensor] = {}
        begin = 0
        for i, source in sorted(enumerate(sources), key=lambda item: -item[1].element_size()):
            flat = buffer[begin : begin + source.nbytes].view(source.dtype)
            views[i] = flat.as_strided(source.shape, source.stride())
            begin += source.nbytes
        return [views[i] for i in range(len(sources))]

    @property
    def staged_bytes(self) -> int:
        """How much of that is in use."""
        return self._pool.stats()["in_use"]

    def fetch(self, copies: list[Copy], after: Event | None = None) -> Event | None:
        """Copy to host memory what the current stream makes; the event is for the host to await.

        Args:
            copies: from the device.
            after: what made their sources, where that is no longer the last of a stream.
        """
        if self._out is not None:
            if after is None:
                self._out.wait_stream(torch.cuda.current_stream(self.device))
            else:
                self._out.wait_event(after)
            for copy in copies:
                if copy.source.is_cuda:  # else the parameter has left the device meanwhile
                    copy.source.record_stream(self._out)  # whoever drops it need not wait
        return self._run(copies, self._out, OUT)

    def hold_back(self) -> None:
        """Let the current stream wait until all is copied that fetch was called with."""
        if self._out is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._out)

    def send(self, copies: list[Copy], after: Event | None) -> Event | None:
        """Copy to the device, after an event; the event that is returned is for streams."""
        if self._back is not None and after is not None:
            self._back.wait_event(after)
        event = self._run(copies, self._back, BACK)
        if event is not None:
            self._returning.append(event)
        return event

    def fingerprint_sent(
        self, parts: list[Tensor], rows: Sequence[int], others: Tensor | None
    ) -> tuple[Tensor, Event | None]:
        """Fingerprint what was sent, right behind it; the event is for streams.

        Args:
            parts: of some parameters, that were sent.
            rows: which of the parameters these are.
            others: fingerprints of all parameters, from before; None: all were sent.

        Returns:
            Fingerprints of all parameters, and when they are there.
        """
        with torch.no_grad(), self._inside(self._back):
            made = fingerprints(parts)
            if others is not None:
                if self._back is not None:
                    others.record_stream(self._back)
                known = list(others)
                for row, value in zip(rows, made, strict=True):
                    known[row] = value
                made = torch.stack(known)
        return made, self._event(self._back)

    def has_room(self) -> bool:
        """Return whether what is sent now will not wait for many others."""
        while self._returning and self._returning[0].query():
            self._returning.popleft()
        return len(self._returning) < _MOST_RETURNING

    def await_room(self) -> None:
        """Wait until there is."""
        while not self.has_room():
            self._returning[0].synchronize()

    def await_on_stream(self, event: Event, awaited: set[int]) -> None:
        """Let the current stream wait for an event, if it is not among those that have."""
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in awaited:
            stream.wait_event(event)
            awaited.add(stream.cuda_stream)
        if stream.cuda_stream != self._event_stream:
            event.synchronize()  # that one may come next, and then nothing lets it wait

    def _run(
        self, copies: list[Copy], stream: "torch.cuda.Stream | None", name: str
    ) -> Event | None:
        recorder = self.recorder
        recorded = nullcontext() if recorder is None else recorder.span(name, self.device)
        had_grad = torch.is_grad_enabled()
        try:  # not torch.no_grad(): Ctrl-C in its own lines would leave forward without gradients
            set_grad_mode(False)
            with self._inside(stream), recorded:
                for target, source in copies:
                    target.copy_(source, non_blocking=stream is not None)
        finally:
            set_grad_mode(had_grad)
        return self._event(stream)

    def _inside(self, stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
        # torch.cuda.stream(None) makes a context on CUDA, which a forked child cannot have.
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _event(self, stream: "torch.cuda.Stream | None") -> Event | None:
        """Return an event of what a stream was given so far."""
        if stream is None:
            return None
        event = Event(blocking=True)  # a host that waits for it sleeps
        event.record(stream)
        return event
