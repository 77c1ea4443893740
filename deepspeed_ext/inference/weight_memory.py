"""WeightMemory: where weights are on the CPU."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.fresh_pages import FreshPages

_SLAB = 64 << 20  # bytes; pages of it that nobody writes take no memory
_LEAST = 256 << 10  # bytes of a tensor
_ALIGNMENT = 128


class WeightMemory:
    """Gives memory for weights, of huge pages where these are to be had at once.

    A step reads all weights, and of small pages each has to be found. On a Zen 4 with 2 threads,
    steps of a model of 0.5 B take a tenth longer with int4 weights in these.

    Tensors are cut from large pieces, each of which goes when none of its tensors is left. Small
    ones are ordinary tensors.
    """

    def __init__(self) -> None:
        self._pages = FreshPages()
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined values."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if room > len(self._left):
            slab = self._pages.take(max(room, _SLAB))
            self._left = torch.frombuffer(slab, dtype=torch.uint8)
        part, self._left = self._left[:nbytes], self._left[room:]
        return part.view(dtype).view(tuple(shape))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)
