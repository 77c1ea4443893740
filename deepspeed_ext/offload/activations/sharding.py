"""Inputs of checkpoints that processes have in common: each keeps a shard, and gathers the rest."""

import math
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.offload.activations.forms import ALIGNMENT, Counter
from deepspeed_ext.offload.activations.kept import Packed, Staying
from deepspeed_ext.offload.activations.packing import Packing
from deepspeed_ext.offload.activations.tracing import untraced_where_compiled
from deepspeed_ext.torch_internals.tensors import version_of


class Layout(NamedTuple):
    """How a tensor lies in memory, and its elements in the order of that.

    Attributes:
        size: of the tensor.
        stride: likewise.
        skew: elements from an aligned address to its first element.
        order: its dimensions, that of the largest stride first.
    """

    size: torch.Size
    stride: tuple[int, ...]
    skew: int
    order: tuple[int, ...]

    @property
    def distinct(self) -> list[int]:
        """The size, with 1 where an element stands for all of a dimension."""
        return [n if s else min(n, 1) for n, s in zip(self.size, self.stride, strict=True)]

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements in a row, without copying those that lie in one."""
        distinct = tensor.as_strided(self.distinct, self.stride)
        return distinct.permute(self.order).reshape(-1)

    def of(self, memory: Tensor, count: int) -> Tensor:
        """Return the tensor of elements in a row, which begin at `skew`, in their memory if it can.

        Args:
            memory: of the dtype; more may be behind them.
            count: how many elements.
        """
        distinct = self.distinct
        ordered = [distinct[dim] for dim in self.order]
        rows = memory[self.skew : self.skew + count].view(ordered)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        made = rows.permute(inverse)
        if any(
            a != b for n, a, b in zip(distinct, made.stride(), self.stride, strict=True) if n > 1
        ):
            span = 1 + sum((n - 1) * s for n, s in zip(distinct, self.stride, strict=True))
            gappy = torch.empty(self.skew + span, dtype=memory.dtype, device=memory.device)
            made = gappy.as_strided(distinct, self.stride, self.skew).copy_(made)
        return made.as_strided(self.size, self.stride, self.skew)


def layout_of(tensor: Tensor) -> Layout:
    """Return how a tensor lies in memory."""
    width = tensor.element_size()
    skew = int(tensor.storage_offset()) * width % ALIGNMENT // width
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return Layout(tensor.size(), strides, skew, tuple(order))


class Shard:
    """What autograd holds for a tensor of which this process keeps a part.

    Args:
        tensor: it.
        layout: of it.
        count: its elements that lie in memory of their own.
        part: what autograd would hold for the part.
    """

    def __init__(self, tensor: Tensor, layout: Layout, count: int, part: Packed | Staying) -> None:
        self._tensor = weakref.ref(tensor)
        self.counter = Counter(tensor)
        self.layout, self.count, self.part = layout, count, part

    def is_of(self, tensor: Tensor) -> bool:
        """Tell whether it is of this tensor, as it is now."""
        return self._tensor() is tensor and self.counter.version == version_of(tensor)


class Sharding:
    """Packs and unpacks what autograd saves, in any thread; all processes unpack the same.

    Nothing is gathered ahead, nor kept for another one that wants it: that depends on what is still
    there, and processes would not gather the same.

    Args:
        packing: of shards, and of what is not shared out.
        mesh: of one dimension.
        min_bytes: tensors of fewer bytes stay whole.
    """

    def __init__(self, packing: Packing, mesh: DeviceMesh, min_bytes: int) -> None:
        self._packing = packing
        self._group = mesh.get_group()
        self._size, self._rank = mesh.size(), mesh.get_local_rank()
        self._min_bytes = min_bytes
        self._known: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which autograd asks this object."""
        return saved_tensors_hooks(self.pack, self.unpack)

    @untraced_where_compiled
    def pack(self, tensor: Tensor) -> Packed | Staying | Shard:
        """Return what autograd is to hold in place of a tensor that it saves."""
        if not self._is_shared(tensor):
            return self._packing.pack(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known.is_of(tensor):
            return known
        with torch.no_grad():
            layout = layout_of(tensor)
            flat = layout.flat(tensor)
            length = -(-flat.numel() // self._size)
            part = flat.new_empty(length)
            own = flat[self._rank * length : (self._rank + 1) * length]
            part[: own.numel()].copy_(own)
            made = Shard(tensor, layout, flat.numel(), self._packing.pack(part))
        self._known[id(tensor)] = made
        return made

    @untraced_where_compiled
    def unpack(self, packed: Packed | Staying | Shard) -> Tensor:
        """Return the tensor; all processes call it, if it is of shards.

        Raises:
            RuntimeError: it was written since it was saved.
        """
        if not isinstance(packed, Shard):
            return self._packing.unpack(packed)
        packed.counter.check()
        with torch.no_grad():
            part = self._packing.unpack(packed.part)
            skew = packed.layout.skew
            memory = part.new_empty(skew + self._size * part.numel())
            whole = memory[skew:].view(torch.uint8)  # which all groups can send
            dist.all_gather_into_tensor(whole, part.view(torch.uint8), group=self._group)
            return packed.layout.of(memory, packed.count)

    def _is_shared(self, tensor: Tensor) -> bool:
        """Tell whether it is shared out, from what all processes know alike.

        What has no graph is not: masks and tables are of all blocks, and would come for each anew.
        """
        if not tensor.requires_grad or not self._packing.can_leave(tensor) or tensor.is_conj():
            return False
        distinct = math.prod(layout_of(tensor).distinct)
        return distinct * tensor.element_size() >= self._min_bytes
