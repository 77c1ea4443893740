"""A picture of a step: copies, the disk, steps in host memory, forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from deepspeed_ext.offload.copies import BACK, FROM_DISK, OUT, REQUESTED, SPECULATIVE, TO_DISK
from deepspeed_ext.offload.optimizer import OffloadOptimizer

_COLORS = {
    OUT: "tab:orange",
    FROM_DISK: "tab:olive",
    SPECULATIVE: "tab:green",
    REQUESTED: "tab:red",
    TO_DISK: "tab:brown",
    BACK: "tab:purple",
}
_OTHERS = ("tab:blue", "tab:cyan", "tab:gray")  # for what users name


class Span(NamedTuple):
    """Something that went on, in seconds from the beginning of the record.

    Attributes:
        name: what.
        begin: when it began.
        end: when it was over.
    """

    name: str
    begin: float
    end: float


class _Events(NamedTuple):
    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class Timeline:
    """Records what an offloaded optimizer does while the context lasts.

    The optimizer has taken a step before. Copies and what `span` encloses are timed by the device,
    without waiting for it; steps in host memory, and transfers of a disk, by the host.

    Args:
        optimizer: whose copies and steps are recorded.

    Example:
        with Timeline(optimizer) as timeline:
            for batch in batches:  # a few
                with timeline.span("forward"):
                    loss = model(batch)
                with timeline.span("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        timeline.draw("step.png")
    """

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._devices = sorted({p.device for p in params if p.device.type == "cuda"}, key=str)
        self._optimizer = optimizer
        self._noted: list[Span | _Events] = []
        self._bases: dict[torch.device, torch.cuda.Event] = {}
        self._begin = 0.0

    def __enter__(self) -> "Timeline":
        self._optimizer.synchronize()
        for device in self._devices:
            torch.cuda.synchronize(device)
        for device in self._devices:
            self._bases[device] = self._event(device)
            torch.cuda.synchronize(device)  # so that it is known when this was on the host
        self._begin = perf_counter()
        self._optimizer._record(self)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._optimizer.synchronize()  # what is under way still belongs to it
        finally:
            self._optimizer._record(None)

    @contextmanager
    def span(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Record what the current stream of a device is given meanwhile.

        Args:
            name: what it is.
            device: None: the first one that parameters are on. On the CPU it is what the host does.
        """
        if device is None and self._devices:
            device = self._devices[0]
        if device is None or device.type != "cuda":
            begin = perf_counter()
            yield
            self.note(name, begin, perf_counter())
            return
        begin_event = self._event(device)
        yield
        self._noted.append(_Events(name, begin_event, self._event(device)))

    def note(self, name: str, begin: float, end: float) -> None:
        """Record what the host has done, by time.perf_counter."""
        self._noted.append(Span(name, begin - self._begin, end - self._begin))

    def _event(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def spans(self) -> list[Span]:
        """Return what was recorded, by the moment when it began. Waits for the devices."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        return sorted(map(self._resolved, self._noted), key=lambda span: span.begin)

    def _resolved(self, noted: Span | _Events) -> Span:
        if isinstance(noted, Span):
            return noted
        base = self._bases[noted.begin.device]
        begin, end = (base.elapsed_time(event) / 1e3 for event in noted[1:])
        return Span(noted.name, begin, end)

    def draw(
        self, path: str | Path, title: str = "", window: tuple[float, float] | None = None
    ) -> None:
        """Draw what was recorded, a line for each name; needs matplotlib.

        Args:
            path: of the picture.
            title: above it.
            window: from when to when, in seconds from the beginning of the record; None: all.
        """
        from matplotlib.figure import Figure

        spans = self.spans()
        begin, end = window or (0.0, max((span.end for span in spans), default=1.0))
        lines = _lines(spans)
        figure = Figure(figsize=(10, 0.8 + 0.45 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for height, (name, color) in enumerate(lines.items()):
            bars = [
                (1e3 * (span.begin - begin), 1e3 * (span.end - span.begin))
                for span in spans
                if span.name == name and span.end > begin and span.begin < end
            ]
            axes.broken_barh(bars, (height - 0.35, 0.7), color=color, edgecolor="white", lw=0.2)
        axes.set(title=title, xlabel="milliseconds", xlim=(0, 1e3 * (end - begin)))
        axes.set_yticks(range(len(lines)), list(lines))
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        figure.savefig(path, dpi=120)


def _lines(spans: list[Span]) -> dict[str, str]:
    """Return the color of each name: first those of users, then in the order of a step."""
    found = dict.fromkeys(span.name for span in spans)
    others = [name for name in found if name not in _COLORS]
    named = {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    return named | {name: color for name, color in _COLORS.items() if name in found}
