"""Gradients that leave the device as they appear, and are added up in host memory."""

from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local, part_for
from deepspeed_ext.offload.copies import Copy, CopyStreams, Event
from deepspeed_ext.offload.sent_gradients import SentGradient, placeholder, sent
from deepspeed_ext.offload.worker import Run, Task, Urgency, Worker


class Sum:
    """The gradient of a parameter, in float32, in the layout of the parameter.

    The parameter has a placeholder for it meanwhile: if that is gone, so is the sum.

    Args:
        param: likewise.
        keeps_first: a sum of one gradient is that itself, in its own dtype.

    Attributes:
        param: whose gradient it is.
        value: in host memory; meaningless while count is 0.
        count: of how many gradients, those included that are still on their way.
        last: adds the last of them; its error is that of whichever has failed first.
    """

    def __init__(self, param: Tensor, keeps_first: bool = False) -> None:
        self.param = param
        self._keeps_first = keeps_first
        self.value = torch.empty(0, device="cpu") if keeps_first else _empty_like(local(param))
        self.count = 0
        self._begun = object()  # which sum it is, of all that there are one after the other
        self.last: Task | None = None

    def lie_as(self, param: Tensor) -> None:
        """Take the layout and the shape of a parameter that has got others."""
        part = local(param)
        if self._keeps_first and not self.count:
            return
        if self.value.shape != part.shape or self.value.stride() != part.stride():
            self.value = _empty_like(part).copy_(self.value.reshape(part.shape))

    def follow(self) -> None:
        """Begin anew if the user has dropped the gradient."""
        left = sent(self.param.grad)
        if left is None or left.since.of is not self._begun:
            self.count = 0

    def has_more(self) -> bool:
        """Return whether the parameter has a gradient, or a part of it, that is not in the sum."""
        left = sent(self.param.grad)
        if left is None:
            return self.param.grad is not None
        return left.is_touched() or self._is_unknown(left)

    def more(self) -> Tensor | None:
        """Return what this process holds of that.

        Raises:
            RuntimeError: the gradient has left, and its sum is not there any more.
        """
        left, param = sent(self.param.grad), self.param
        if left is None:
            return None if param.grad is None else source_of(param.grad, param)
        if self._is_unknown(left):
            raise RuntimeError(
                "OffloadOptimizer: p.grad is of a sum that was stepped or dropped, expected that of"
                " the last backward, or None; gradients cannot be kept and put back, or stepped by"
                " another optimizer, with free_grads=True"
            )
        value = left.added()
        return None if value is None else laid_out_as(value, local(param))

    def _is_unknown(self, left: SentGradient) -> bool:
        return not self.count or left.since.of is not self._begun

    def replace(self) -> None:
        """Count what the parameter has more, and leave a placeholder for all."""
        left = sent(self.param.grad)
        if left is None or left.since.is_dropped:
            self.count = 0
        if not self.count:
            self._begun = object()
        self.count += 1
        self.param.grad = placeholder(self.param, self._begun)

    def check(self) -> None:
        """Raise what went wrong as gradients were added, when that is over."""
        if self.count and self.last is not None and self.last.error is not None:
            raise self.last.error

    def forget(self) -> None:
        """Begin anew: what was accumulated is not wanted any more."""
        self.count = 0
        if self._keeps_first:
            self.value = torch.empty(0, device="cpu")  # its memory is for the next one
        if sent(self.param.grad) is not None:
            self.param.grad = None

    def adding(
        self, before: Task | None, grad: Tensor, arrives: Event | None, source: Tensor
    ) -> Run:
        """Return what adds a gradient that is on its way, in the worker's thread.

        Args:
            before: has added the one before; None: this one begins a sum.
            grad: in host memory, when it has arrived.
            arrives: when it has.
            source: what is copied, kept until then.
        """
        first = None
        if self._keeps_first and before is None:
            self.value = grad
        elif self._keeps_first and self.value.dtype != torch.float32:
            first, self.value = self.value, _empty_like(local(self.param))
        return partial(_add, self.value, first, before, grad, arrives, source)


class Adder:
    """Has gradients added to their sums, by a worker.

    Attributes:
        bytes_out: that were copied for that, so far.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._adding: list[Task] = []
        self.bytes_out = 0

    def take(self, known: Sum, source: Tensor, streams: CopyStreams) -> None:
        """Begin to copy what a parameter has more than is in its sum, and have it added.

        Args:
            known: the sum of the parameter.
            source: that part of its gradient.
            streams: of its device.
        """
        [memory] = streams.staged([source])
        event = streams.fetch([Copy(memory, source)])
        known.replace()
        before = known.last if known.count > 1 else None
        run = known.adding(before, memory, event, source)
        # In their order, which events do not tell: one may be over right after it was asked for.
        needs = [] if known.last is None else [known.last]
        known.last = self._worker.submit(Task(run, Urgency.ADD, events=[event], needs=needs))
        self._adding = [*(task for task in self._adding if not task.done), known.last]
        self.bytes_out += source.nbytes

    def finish(self) -> None:
        """Wait until all gradients are added that are on their way."""
        self._worker.wait(self._adding)


def _add(
    value: Tensor,
    first: Tensor | None,
    before: Task | None,
    grad: Tensor,
    arrives: Event | None,
    source: Tensor,
) -> None:
    """Add a gradient to a value, which has that of the first one, has it elsewhere, or is it."""
    if before is not None and before.error is not None:
        raise before.error
    if arrives is not None:
        arrives.synchronize()
    if first is not None:
        value.copy_(first).add_(grad)
    elif before is not None:
        value.add_(grad)
    elif value is not grad:
        value.copy_(grad)


def source_of(grad: Tensor, param: Tensor) -> Tensor:
    """Return what this process holds of a gradient, in the layout of its parameter."""
    return laid_out_as(part_for(grad, param), local(param))


def laid_out_as(part: Tensor, target: Tensor) -> Tensor:
    """Return this tensor, or a copy with the layout and on the device of another."""
    if part.stride() == target.stride() and part.device == target.device:
        return part.detach()
    made = torch.empty_strided(
        target.shape, target.stride(), dtype=part.dtype, device=target.device
    )
    return made.copy_(part)


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_strided(part.shape, part.stride(), dtype=torch.float32, device="cpu")
