"""Which parameters come to the device as one, where each lies there, and what it was then."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext.torch_internals.tensors import past_torch_function, version_of

_ALIGNMENT = 256  # bytes, as those of torch's own allocations on a device


class Look(NamedTuple):
    """What a parameter is, as far as that tells from its content."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    address: int
    version: int


class Piece:
    """Parameters that come by copies one after another, to one piece of memory.

    Args:
        params: at rest.
        block: whose they all are, or None.

    Attributes:
        params: likewise.
        looks: of each, now.
        begins: the first byte of each.
        nbytes: of all.
    """

    def __init__(self, params: Sequence[Tensor], block: nn.Module | None) -> None:
        self.params = tuple(params)
        self._block = None if block is None else weakref.ref(block)
        with past_torch_function():  # it waits for no step that is under way
            self.looks = tuple(map(_look, self.params))
        begins, end = [], 0
        for look in self.looks:
            begins.append(end)
            end += -(-look.shape.numel() * look.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.begins, self.nbytes = tuple(begins), end

    def look_again(self) -> None:
        """Take note of where parameters are once their steps are over: these may move them."""
        self.looks = tuple(_look(param) for param in self.params)

    @property
    def block(self) -> nn.Module | None:
        """Whose parameters these all are, if it is there."""
        return None if self._block is None else self._block()

    def weight(self, memory: Tensor, i: int) -> Tensor:
        """Return the memory of a parameter, as a tensor with a version counter of its own."""
        look = self.looks[i]
        flat = torch.empty(0, dtype=look.dtype, device=memory.device)
        begin = self.begins[i] // look.dtype.itemsize
        shared: Tensor = flat.set_(memory.untyped_storage(), begin, look.shape, look.stride)
        return shared

    def is_like(self, other: "Piece") -> bool:
        """Tell whether the other has the same parameters, as they are in this one."""
        same = len(self.params) == len(other.params) and self.looks == other.looks
        return same and all(a is b for a, b in zip(self.params, other.params, strict=True))


def _look(param: Tensor) -> Look:
    detached = param.detach()
    stride = detached.stride()
    if not _is_dense(detached.shape, stride):
        stride = torch.empty(detached.shape, device="meta").stride()
    return Look(param.dtype, param.shape, stride, param.data_ptr(), version_of(param))


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Tell whether the elements fill their memory, each at a place of its own."""
    step = 1
    for one, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if one != step:
            return False
        step *= size
    return True
