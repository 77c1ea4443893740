"""WeightMemory: where weights are on the CPU."""

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.fresh_pages import FreshPages
from deepspeed_ext.quantization.layout import TensorLayout

_HUGE = 2 << 20  # bytes
_SLAB = 64 << 20  # pages of it that nobody writes take no memory
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
        self._pages = FreshPages(_huge_pages)
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined values."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if room > len(self._left):
            slab = self._pages.take(max(-(-room // _HUGE) * _HUGE, _SLAB))
            self._left = torch.frombuffer(slab, dtype=torch.uint8)
        part, self._left = self._left[:nbytes], self._left[room:]
        return part.view(dtype).view(tuple(shape))

    def zeros(self, layouts: Mapping[str, TensorLayout]) -> dict[str, Tensor]:
        """Return tensors full of zeros, by name."""
        return {name: self.empty(*each).zero_() for name, each in layouts.items()}


def _huge_pages(nbytes: int) -> memoryview:
    """Return memory that begins where a huge page does, as all of it can only then be of such."""
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    return memoryview(memory)[skip : skip + nbytes]
