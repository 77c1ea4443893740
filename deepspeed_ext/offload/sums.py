"""Gradients that leave the device as they appear, and are added up in host memory."""

from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.copies import Copy, Event, Lanes
from deepspeed_ext.offload.worker import Task, Urgency, Worker


class Sum:
    """The gradient of a parameter, in float32, in the layout of the parameter.

    Attributes:
        value: in host memory; meaningless while count is 0.
        count: of how many gradients, those included that are still on their way.
        last: adds the last of them; its error is that of whichever has failed first.
    """

    def __init__(self, param: Tensor) -> None:
        self.value = _empty_like(local(param))
        self.count = 0
        self.last: Task | None = None

    def lie_as(self, param: Tensor) -> None:
        """Take the layout and the shape of a parameter that has got others."""
        part = local(param)
        if self.value.shape != part.shape or self.value.stride() != part.stride():
            self.value = _empty_like(part).copy_(self.value.reshape(part.shape))

    def add(self, before: Task | None, grad: Tensor, arrives: Event | None, source: Tensor) -> None:
        """Add a gradient that is on its way; in the worker's thread.

        Args:
            before: has added the one before; None: this one begins a sum.
            grad: in host memory, when it has arrived.
            arrives: when it has.
            source: what is copied, kept until then.
        """
        if before is not None and before.error is not None:
            raise before.error
        if arrives is not None:
            arrives.synchronize()
        if before is None:
            self.value.copy_(grad)
        else:
            self.value.add_(grad)


class Sums:
    """Those of all parameters that have had one.

    Args:
        worker: adds gradients.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._by_param: dict[int, Sum] = {}
        self._adding: list[Task] = []
        self.bytes_out = 0

    def of(self, param: Tensor) -> Sum:
        """Return the sum of a parameter, which may be of no gradient yet."""
        if id(param) not in self._by_param:
            self._by_param[id(param)] = Sum(param)
        return self._by_param[id(param)]

    def has(self, param: Tensor) -> bool:
        """Return whether there are gradients of a parameter."""
        return id(param) in self._by_param and self._by_param[id(param)].count > 0

    def has_any(self) -> bool:
        """Return whether there are gradients of any."""
        return any(known.count for known in self._by_param.values())

    def take(self, param: Tensor, source: Tensor, lanes: Lanes) -> None:
        """Begin to copy what this process holds of a gradient, and have it added.

        Args:
            param: the parameter.
            source: of its gradient, in its layout.
            lanes: to its device.
        """
        known = self.of(param)
        [memory] = lanes.staged([source])
        event = lanes.fetch([Copy(memory, source)])
        before = known.last if known.count else None
        run = partial(known.add, before, memory, event, source)
        # In their order, which events do not tell: one may be over right after it was asked for.
        needs = [] if known.last is None else [known.last]
        known.last = self._worker.submit(Task(run, Urgency.ADD, events=[event], needs=needs))
        known.count += 1
        self._adding = [*(task for task in self._adding if not task.done), known.last]
        self.bytes_out += source.nbytes

    def finish(self) -> None:
        """Wait until all gradients are added that are on their way."""
        self._worker.wait(self._adding)

    def check(self) -> None:
        """Raise what went wrong with a sum, after that."""
        for known in self._by_param.values():
            if known.count and known.last is not None and known.last.error is not None:
                raise known.last.error

    def forget(self) -> None:
        """Begin anew: what was accumulated is not wanted any more."""
        for known in self._by_param.values():
            known.count = 0


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_strided(part.shape, part.stride(), dtype=torch.float32, device="cpu")
