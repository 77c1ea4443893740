"""Memory for tensors on meta, which stay the same objects: in ties, in groups, in optimizers."""

import ctypes

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import RESTS, is_dtensor, rests_on_host, spread
from deepspeed_ext.offload.streamed import BESIDE
from deepspeed_ext.torch_internals.tensors import part_of, version_of

_WORTH_IT = 1 << 20  # bytes
_EMPTY = "_deepspeed_ext_empty"  # attribute of a parameter: its version when it got memory


def allocate(tensor: Tensor, device: torch.device) -> None:
    """Give a parameter or buffer on meta undefined values; of a DTensor, its part only.

    Args:
        tensor: on meta.
        device: where to; what rests in host memory goes there.
    """
    device = torch.device("cpu") if rests_on_host(tensor) else device
    put(tensor, torch.empty_like(part_of(tensor) if is_dtensor(tensor) else tensor, device=device))


def put(tensor: Tensor, part: Tensor) -> None:
    """Let a parameter or buffer on meta have this memory; a DTensor, for its part.

    Args:
        tensor: on meta.
        part: of its shape and dtype, or of those of its part in this process.
    """
    made: Tensor = spread(part, tensor) if is_dtensor(tensor) else part
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    kept = {name: vars(tensor)[name] for name in (RESTS, BESIDE) if name in vars(tensor)}
    vars(made).update(kept)
    torch.utils.swap_tensors(tensor, made)


def note_empty(tensor: Tensor) -> None:
    """Say that a tensor has memory, and no values yet: `Init.fill` is to give it some."""
    vars(tensor)[_EMPTY] = version_of(tensor)


def is_empty(tensor: Tensor) -> bool:
    """Tell whether a tensor has no values, on meta or because nobody has written any since."""
    return tensor.is_meta or vars(tensor).get(_EMPTY) == version_of(tensor)


def note_filled(tensor: Tensor) -> None:
    """Say that it has."""
    vars(tensor).pop(_EMPTY, None)


def give_back(size: int) -> None:
    """Return what was freed to the system, which else may keep more of it than a model has.

    What stays of each parameter lies between what was let go of, so that glibc finds no end to cut.

    Args:
        size: of what was freed on the CPU, in bytes; nothing is done for little.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if size >= _WORTH_IT and trim is not None:
        trim(0)
