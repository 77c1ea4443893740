"""Host copies of parameters: what the optimizer in host memory takes for its parameters."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.io import PinnedBuffer
from deepspeed_ext.processors import Share
from deepspeed_ext.torch_internals.tensors import put_part

_ALIGNMENT = 256  # bytes, as those of torch's own allocations on a device

Memory = Callable[[Sequence[Tensor]], list[Tensor]]


def host_memory(tensors: Sequence[Tensor], share: Share) -> list[Tensor]:
    """Return pinned host memory in the shape, dtype and layout of each of these, in one piece."""
    nbytes = host_bytes(tensors)
    PinnedBuffer(0)  # compiles what it needs, here, where it may use all processors
    memory = share.touching(nbytes, partial(PinnedBuffer, nbytes)).tensor()
    return laid_out(tensors, memory)


def laid_out(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Return parts of memory, of as many bytes as host_bytes says, in the form of each of these."""
    sizes = list(map(_padded, tensors))
    made = []
    for tensor, size, begin in zip(tensors, sizes, _begins(sizes), strict=True):
        flat = memory[begin : begin + size].view(tensor.dtype)
        # With version counters of their own: that of a view counts writes to all of the memory.
        made.append(flat.as_strided(tensor.shape, tensor.stride()).data)
    return made


def host_bytes(tensors: Sequence[Tensor]) -> int:
    """Return how much host_memory takes for these."""
    return sum(map(_padded, tensors))


def host_copies(params: Sequence[Tensor], share: Share) -> list[Tensor]:
    """Return host copies of parameters: parameters in pinned memory; of DTensors, DTensors."""
    parts = [local(param).detach() for param in params]
    made: list[Tensor] = []
    for param, part, memory in zip(params, parts, host_memory(parts, share), strict=True):
        copy = memory.copy_(part)
        whole = spread(copy, param) if is_dtensor(param) else copy
        made.append(torch.nn.Parameter(whole, requires_grad=param.requires_grad))
    return made


def untouched_copy(param: Tensor) -> Tensor:
    """Return what looks like a host copy, of memory that is not touched: so there is none yet."""
    part = local(param).detach()
    memory = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="cpu")
    whole = spread(memory, param) if is_dtensor(param) else memory
    return torch.nn.Parameter(whole, requires_grad=param.requires_grad)


def remake(copy: Tensor, param: Tensor, memory_for: Memory) -> None:
    """Make a host copy what its parameter is by now."""
    part = local(param).detach()
    [memory] = memory_for([part])
    put(copy, memory.copy_(part))


def put(copy: Tensor, memory: Tensor) -> None:
    """Give a host copy other memory."""
    if is_dtensor(copy):
        put_part(copy, memory)
    else:
        copy.data = memory


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _begins(sizes: Sequence[int]) -> Iterator[int]:
    begin = 0
    for size in sizes:
        yield begin
        begin += size
