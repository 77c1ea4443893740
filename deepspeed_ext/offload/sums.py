"""Gradients that leave the device as they appear, and are added up in host memory."""

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.copies import Event
from deepspeed_ext.offload.worker import Task


class Sum:
    """The gradient of a parameter, in float32, in the layout of the parameter.

    Attributes:
        value: in host memory; meaningless while count is 0.
        count: of how many gradients, those included that are still on their way.
        last: adds the last of them.
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

    def add(self, is_first: bool, grad: Tensor, arrives: Event | None, source: Tensor) -> None:
        """Add a gradient that is on its way; in the worker's thread.

        Args:
            is_first: it begins a sum.
            grad: in host memory, when it has arrived.
            arrives: when it has.
            source: what is copied, kept until then.
        """
        if arrives is not None:
            arrives.synchronize()
        if is_first:
            self.value.copy_(grad)
        else:
            self.value.add_(grad)


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_strided(part.shape, part.stride(), dtype=torch.float32, device="cpu")
