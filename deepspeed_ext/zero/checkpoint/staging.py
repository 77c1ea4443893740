"""Copies of tensors that a save can read while training goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.io import PinnedBuffer

_ALIGNMENT = 64


def staged(
    tensors: Mapping[str, Tensor], room: Tensor | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return copies in host memory, and that memory, to be given again for the next ones.

    Getting memory and pinning it takes longer than copying. Returns when the tensors may change
    again.

    Args:
        tensors: by name.
        room: memory that an earlier call returned, and that nobody reads any more.
    """
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    sizes = {name: -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for name, p in parts.items()}
    needed = sum(sizes.values())
    has_cuda = any(part.is_cuda for part in parts.values())
    if room is None or room.numel() < needed:
        room = None  # first, so that there is never memory for both
        if has_cuda:
            room = PinnedBuffer(needed).tensor()
        else:
            room = torch.empty(needed, dtype=torch.uint8, device="cpu")
    copies, offset = {}, 0
    for name, part in parts.items():
        copy = room[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
        copy.copy_(part, non_blocking=True)
        offset += sizes[name]
        whole = tensors[name]
        copies[name] = spread(copy, whole) if is_dtensor(whole) else copy
    if has_cuda:
        torch.cuda.current_stream().synchronize()
    return copies, room
