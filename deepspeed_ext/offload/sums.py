"""Gradients that leave the device as they appear, and are added up in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.copies import Event


class Sums:
    """The gradients of a bucket, in float32, in the layout of its parameters.

    Attributes:
        values: one for each parameter.
        counts: how many gradients each is the sum of, those included that are still on their way.
    """

    def __init__(self, owners: Sequence[Tensor]) -> None:
        parts = list(map(local, owners))
        self.values = [
            torch.empty_strided(p.shape, p.stride(), dtype=torch.float32, device="cpu")
            for p in parts
        ]
        self.counts = [0] * len(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(value.nbytes for value in self.values)

    def clear(self) -> None:
        """Begin anew."""
        self.counts = [0] * len(self.counts)

    def add(
        self, i: int, is_first: bool, grad: Tensor, arrives: Event | None, source: Tensor
    ) -> None:
        """Add a gradient that is on its way; in the worker's thread.

        Args:
            i: number of the parameter.
            is_first: it begins a sum.
            grad: in host memory, when it has arrived.
            arrives: when it has.
            source: what is copied, kept until then.
        """
        if arrives is not None:
            arrives.synchronize()
        if is_first:
            self.values[i].copy_(grad)
        else:
            self.values[i].add_(grad)
