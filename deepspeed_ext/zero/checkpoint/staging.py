"""Copies of tensors that a save can read while training goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.io import PinnedBuffer

_ALIGNMENT = 64


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, those of tensors on a device in one pinned buffer.

    Returns when the tensors may change again.
    """
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    sizes = {n: -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for n, p in parts.items() if p.is_cuda}
    pinned = PinnedBuffer(sum(sizes.values())).tensor() if sizes else None
    copies, offset = {}, 0
    for name, part in parts.items():
        if pinned is not None and name in sizes:
            copy = pinned[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
            copy.copy_(part, non_blocking=True)
            offset += sizes[name]
        else:
            copy = part.clone(memory_format=torch.contiguous_format)
        whole = tensors[name]
        copies[name] = spread(copy, whole) if is_dtensor(whole) else copy
    if sizes:
        torch.cuda.current_stream().synchronize()
    return copies
