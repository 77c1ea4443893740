"""What is known of each step; numbers stay on the device until somebody reads them."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Step:
    """A step that is over.

    Args:
        number: how many steps there were with it.
        samples: how many samples there were with it, of all processes.
        values: of it, by name; tensors are read by `numbers`.
        phases: what was measured of it, if that was asked for.
    """

    number: int
    samples: int
    values: Mapping[str, Any]
    phases: "Phases | None" = None

    def numbers(self) -> dict[str, float]:
        """Return the values as numbers, and what was measured; waits for the device."""
        found = {name: float(value) for name, value in self.values.items() if value is not None}
        return found | (self.phases.numbers() if self.phases is not None else {})


class Metrics:
    """What is collected while a step is under way.

    Args:
        processes: that have as many samples and tokens as this one.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._since: float | None = None  # the end of the last step
        self.last: Step | None = None

    def begin(self) -> None:
        """Forget what a step has left that did not come to its end."""
        self._losses, self._tokens = [], 0
        if self._since is None:
            self._since = time.perf_counter()

    def add_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a forward: of input_ids, or of a first argument of integers."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor) and tokens.dim() > 1 and not tokens.is_floating_point():
            self._tokens += tokens.numel()

    def add_loss(self, loss: Tensor) -> None:
        """Take the loss of a micro-step, as it is added to the others."""
        self._losses.append(loss.detach())

    def end(
        self, number: int, samples: int, in_step: int, phases: "Phases | None", **values: Any
    ) -> Step:
        """Return a step that is over.

        Args:
            number, samples, phases: of it.
            in_step: its samples, of all processes.
            values: what else is known of it; None is left out.
        """
        now = time.perf_counter()
        seconds = now - self._since if self._since is not None else 0.0
        self._since = now
        tokens = self._tokens * self._processes
        loss = torch.stack(self._losses).sum() if len(self._losses) > 1 else None
        made = {
            "loss": self._losses[0] if len(self._losses) == 1 else loss,
            **values,
            "samples_per_second": in_step / seconds if seconds else None,
            "tokens_per_second": tokens / seconds if tokens and seconds else None,
        }
        self.begin()
        self.last = Step(number, samples, made, phases)
        return self.last


@dataclass
class Phases:
    """Times and memory of the phases of a step: by events on CUDA, by the clock elsewhere.

    Args:
        device: that computes.
        with_times, with_memory: what is measured.
    """

    device: torch.device
    with_times: bool
    with_memory: bool
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    _memory: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measure a phase, again in each micro-step."""
        begin = self._now() if self.with_times else None
        yield
        if self.with_times:
            self._spans.append((phase, begin, self._now()))
        if self.with_memory:
            self._memory[phase] = self._bytes()

    def numbers(self) -> dict[str, float]:
        """Return milliseconds of each phase, and bytes at its end; waits for the device."""
        found: dict[str, float] = {}
        for phase, begin, end in self._spans:
            name = f"elapsed_time_ms_{phase}"
            found[name] = found.get(name, 0.0) + self._milliseconds(begin, end)
        found |= {f"memory_bytes_{phase}": size for phase, size in self._memory.items()}
        if self.with_memory and self.device.type == "cuda":
            found["memory_bytes_peak"] = torch.cuda.max_memory_allocated(self.device)
        return found

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, begin: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - begin) * 1e3
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _bytes(self) -> int:
        """Return what tensors have on a GPU, or what this process has in host memory."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sentence(step: Step) -> str:
    """Return a step in words, for a log."""
    numbers = step.numbers()
    parts = []
    for name, value in numbers.items():
        if name.endswith("_per_second"):
            parts.append(f"{value:.4g} {name.replace('_per_second', '/s')}")
        elif name.startswith("elapsed_time_ms_"):
            parts.append(f"{name.removeprefix('elapsed_time_ms_')} {value:.4g} ms")
        elif name.startswith("memory_bytes_"):
            phase = name.removeprefix("memory_bytes_")
            parts.append(
                f"memory {'at its peak' if phase == 'peak' else 'after ' + phase}"
                f" {value / 2**30:.3g} GiB"
            )
        else:
            parts.append(f"{name} {value:.4g}")
    return f"step {step.number}: " + ", ".join(parts)
