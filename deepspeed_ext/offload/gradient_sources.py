"""Where a bucket finds its gradients: on the device, or as sums in host memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, same_layout
from deepspeed_ext.offload.copies import Copy, CopyStreams, Event
from deepspeed_ext.offload.host_gradients import source_of
from deepspeed_ext.offload.param_table import Row
from deepspeed_ext.offload.seals import Question, Seal, parts_of, seal, stamps_of
from deepspeed_ext.offload.worker import Task


class Taken(NamedTuple):
    """Gradients to step by.

    Attributes:
        indices: of the parameters that have one.
        sources: what is in host memory, or is to be copied there.
        needs: what adds them up, where that is done in host memory.
    """

    indices: list[int]
    sources: list[Tensor]
    needs: list[Task]


class GradientSource(Protocol):
    """The gradients of some parameters, and whether they are final when hooks tell of them.

    Attributes:
        are_final: nobody wrote to gradients after hooks had told of them, the last time. Others
            may, as DDP does in each step.
        bytes_out: that were copied from the device, so far.
    """

    are_final: bool
    bytes_out: int

    def current(self) -> list[Tensor | None]:
        """Return the gradients as they are now."""

    def on_device(self) -> list[Tensor]:
        """Return what this process holds of those that there are, where the parameters are."""

    def are_complete(self) -> bool:
        """Return whether all are there, in a form that may be taken before step()."""

    def staged_bytes(self) -> int:
        """Return how many bytes of host memory it takes to take them."""

    def take(self) -> Taken:
        """Return those that there are."""

    def stage(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory on the host for these."""

    def fetch(self, host: Sequence[Tensor], sources: Sequence[Tensor]) -> Event | None:
        """Begin to copy a part of those to it; the event is for the host to await."""

    def watch(self) -> None:
        """Take note of what they are, before anything is done with them."""

    def forget(self) -> None:
        """Drop that note."""

    def late(self) -> list[Row[Any]]:
        """Return the rows of parameters with a gradient that is not in its sum yet."""

    def have_changed(self, taken: Sequence[int] | None, were_late: bool) -> bool:
        """Return whether it shows that those that were noted, or taken, are not those of now.

        Args:
            taken: indices of those that were; None: none were.
            were_late: there were late ones.
        """

    def question(self) -> Question | None:
        """Return what shows for sure whether they are what was noted."""

    def answer(self, differs: Sequence[bool]) -> bool:
        """Take note of the answer, and return whether all are."""


class DeviceGradients:
    """Those that stay on the device until step(), as in torch: see `GradientSource`."""

    def __init__(self, params: Sequence[Tensor], streams: CopyStreams) -> None:
        self._params, self._streams = params, streams
        self._sealed: Seal | None = None  # when hooks told that all are there
        self.are_final, self.bytes_out = True, 0

    def current(self) -> list[Tensor | None]:
        return [param.grad for param in self._params]

    def on_device(self) -> list[Tensor]:
        both = zip(self.current(), self._params, strict=True)
        return [source_of(grad, param) for grad, param in both if grad is not None]

    def are_complete(self) -> bool:
        return all(map(is_plain, self.current(), self._params))

    def staged_bytes(self) -> int:
        return sum(local(grad).nbytes for grad in self.current() if grad is not None)

    def take(self) -> Taken:
        indices = [i for i, grad in enumerate(self.current()) if grad is not None]
        sources = self.on_device()
        self.bytes_out += sum(source.nbytes for source in sources)
        return Taken(indices, sources, [])

    def stage(self, sources: Sequence[Tensor]) -> list[Tensor]:
        return self._streams.staged(sources)

    def fetch(self, host: Sequence[Tensor], sources: Sequence[Tensor]) -> Event | None:
        return self._streams.fetch(list(map(Copy, host, sources)))

    def watch(self) -> None:
        self._sealed = seal(self.current())

    def forget(self) -> None:
        self._sealed = None

    def late(self) -> list[Row[Any]]:
        return []

    def have_changed(self, taken: Sequence[int] | None, were_late: bool) -> bool:
        if self._sealed is None or self._sealed.stamps == stamps_of(self.current()):
            return False
        self.are_final = False
        return True

    def question(self) -> Question | None:
        if self._sealed is None:
            return None
        return Question(parts_of(self.current()), self._sealed.prints)

    def answer(self, differs: Sequence[bool]) -> bool:
        self.are_final = not any(differs)
        return self.are_final


class SummedGradients:
    """Those that leave the device at once, and are added up: see `GradientSource`.

    What somebody writes after a hook is told by the placeholder that the parameter has meanwhile:
    there is nothing to note.
    """

    bytes_out = 0  # who has them added counts that

    def __init__(self, rows: Sequence[Row[Any]], device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._sums = [row.summed() for row in rows]
        self.are_final = True
        for known, row in zip(self._sums, rows, strict=True):
            known.lie_as(row.param)

    def current(self) -> list[Tensor | None]:
        return [known.value if known.count else None for known in self._sums]

    def on_device(self) -> list[Tensor]:
        return [known.value.to(self._device) for known in self._sums if known.count]

    def are_complete(self) -> bool:
        return self.are_final and all(known.count for known in self._sums)

    def staged_bytes(self) -> int:
        return 0

    def take(self) -> Taken:
        indices = self._present()
        some = [self._sums[i] for i in indices]
        values = [known.value for known in some]
        needs = [known.last for known in some if known.last is not None]
        return Taken(indices, values, needs)

    def stage(self, sources: Sequence[Tensor]) -> list[Tensor]:
        return list(sources)

    def fetch(self, host: Sequence[Tensor], sources: Sequence[Tensor]) -> Event | None:
        return None

    def watch(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def late(self) -> list[Row[Any]]:
        return [row for row in self._rows if row.summed().has_more()]

    def have_changed(self, taken: Sequence[int] | None, were_late: bool) -> bool:
        self.are_final = not were_late
        return were_late or (taken is not None and list(taken) != self._present())

    def _present(self) -> list[int]:
        return [i for i, known in enumerate(self._sums) if known.count]

    def question(self) -> Question | None:
        return None

    def answer(self, differs: Sequence[bool]) -> bool:
        return self.are_final


def is_plain(grad: Tensor | None, param: Tensor) -> bool:
    """Return whether there is a gradient, and in this process what its parameter is."""
    if grad is None:
        return False
    if is_dtensor(param):
        return is_dtensor(grad) and same_layout(grad, param)
    return grad.layout is torch.strided and not is_dtensor(grad)
