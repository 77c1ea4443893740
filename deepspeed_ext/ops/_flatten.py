"""Many tensors as one flat tensor, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors, one after the other, in new memory.

    Args:
        tensors: any shapes and layouts, one dtype, one device. Not modified. Elements of each are
            taken in the order of its indices, wherever they lie in memory.

    Returns:
        (total number of elements,), dtype and device of the tensors; float32 on the CPU if there
        are none. Gradients flow back.

    Raises:
        ValueError: a tensor has another dtype or device than the first one.
    """
    if not tensors:
        return torch.empty(0)
    for i, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"flatten: tensors[{i}] is {_name(tensor.dtype)},"
                f" expected {_name(tensors[0].dtype)}"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"flatten: tensors[{i}] is on {tensor.device}, expected {tensors[0].device}"
            )
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of these tensors, as `flatten` lays them out.

    Args:
        flat: (total number of elements of the tensors,), any dtype and device.
        tensors: give the shapes, and nothing else.

    Returns:
        One view for each tensor, contiguous if flat is; a write to it is a write to flat.

    Raises:
        ValueError: flat has more than one dimension, or another number of elements.
    """
    if flat.dim() != 1:
        raise ValueError(f"unflatten: flat has shape {list(flat.shape)}, expected one dimension")
    numels = [tensor.numel() for tensor in tensors]
    if flat.numel() != sum(numels):
        raise ValueError(f"unflatten: flat has {flat.numel()} elements, expected {sum(numels)}")
    parts = flat.split(numels) if numels else []
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
