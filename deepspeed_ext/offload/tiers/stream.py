"""One row of bytes in records of a bounded size: weights, and state that rests in memory."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.offload.tiers.records import Records, Transfer
from deepspeed_ext.ops.optimizers.state_formats import in_memory_order, is_dense

_ALIGNMENT = 64  # bytes

Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # first byte, shape, strides


class StreamInfo(NamedTuple):
    """Where a stream is.

    Attributes:
        names: of its records, one behind the other.
        record_bytes: of each but the last.
        nbytes: of all.
    """

    names: list[str]
    record_bytes: int
    nbytes: int


class StreamWriter:
    """Writes tensors one behind the other, through a few slabs of memory.

    Args:
        records: take them.
        slabs: memory, of whole pages; it is in use until `end` or `abandon`.
        name: begins those of the records: `<name>.0` and so on.
    """

    def __init__(self, records: Records, slabs: Sequence[Tensor], name: str) -> None:
        self._records, self._name = records, name
        self._free = list(slabs)
        self._record_bytes = slabs[0].nbytes
        self._writes: deque[tuple[Tensor, Transfer]] = deque()
        self._slab: Tensor | None = None
        self._used = 0  # bytes of it
        self.names: list[str] = []
        self._nbytes = 0

    def append(self, tensor: Tensor) -> Place:
        """Write a tensor, and return where.

        Args:
            tensor: any dtype, strides and device.
        """
        tensor = tensor.detach()
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        self._write(torch.zeros(-self._nbytes % _ALIGNMENT, dtype=torch.uint8, device="cpu"))
        begin = self._nbytes
        if tensor.numel():
            self._write(in_memory_order(tensor).view(torch.uint8))
        return begin, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())

    def end(self) -> StreamInfo:
        """Write the rest, wait for all, and return where it is.

        Raises:
            OSError: something could not be written.
        """
        if self._slab is not None and self._used:
            self._put()
        while self._writes:
            self._collect()
        return StreamInfo(self.names, self._record_bytes, self._nbytes)

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for _, write in self._writes:
            write.exception()

    def _write(self, data: Tensor) -> None:
        begin = 0
        while begin < data.nbytes:
            if self._slab is None:
                while not self._free:
                    self._collect()
                self._slab, self._used = self._free.pop(), 0
            count = min(data.nbytes - begin, self._record_bytes - self._used)
            self._slab[self._used : self._used + count].copy_(data[begin : begin + count])
            begin += count
            self._used += count
            self._nbytes += count
            if self._used == self._record_bytes:
                self._put()

    def _put(self) -> None:
        assert self._slab is not None
        name = f"{self._name}.{len(self.names)}"
        self._records.hold([name])
        self.names.append(name)
        self._writes.append((self._slab, self._records.put(name, self._slab[: self._used])))
        self._slab = None

    def _collect(self) -> None:
        slab, write = self._writes.popleft()
        try:
            write.result()
        finally:
            self._free.append(slab)


def shown_stream(records: Records, info: StreamInfo) -> tuple[Any, Tensor]:
    """Return memory that shows a stream, and all its bytes as a tensor."""
    names, record_bytes, nbytes = info
    view, memory = records.file_map(nbytes)
    for i, name in enumerate(names):
        begin = i * record_bytes
        records.store.show(name, view, begin, min(record_bytes, nbytes - begin))
    return view, memory


def tensor_at(memory: Tensor, place: Place) -> Tensor:
    """Return a tensor of a stream, as a part of its memory."""
    begin, dtype, shape, strides = place
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = memory[begin : begin + (last + 1) * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, strides)
