"""Tensors as plain memory: where their bytes lie, and which tensors have none of their own."""

import ctypes
import errno
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.tensors import is_traceable_wrapper_subclass, is_zero_tensor


def a(value: object) -> str:
    """Name the type of a value in a sentence."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_kind(what: str, tensor: object) -> Tensor:
    """Return the tensor if its elements lie in memory.

    Args:
        what: names operation and argument in the error, such as "AsyncIO.read: tensor".
        tensor: what the caller was given.

    Raises:
        TypeError: it is no tensor, or one whose elements lie in other tensors or nowhere.
        ValueError: its memory was freed or cut off.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} is {a(tensor)}, expected a torch.Tensor")
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{what} is {a(tensor)}, expected a plain torch.Tensor;"
            " pass the tensor inside, such as DTensor.to_local()"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}, expected torch.strided")
    if tensor.is_quantized:
        raise TypeError(f"{what} has quantized dtype {tensor.dtype}, expected a plain dtype")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{what} is on {tensor.device}, expected cpu or cuda")
    _check_memory(what, tensor)
    return tensor


def _check_memory(what: str, tensor: Tensor) -> None:
    """Refuse what only seems to have memory, such as FakeTensors and freed parameters of FSDP."""
    if tensor.numel() == 0:
        return
    storage = tensor.untyped_storage()
    if storage.device.type != tensor.device.type or is_zero_tensor(tensor):
        raise TypeError(f"{what} is {a(tensor)}, expected a torch.Tensor that has values")
    reach = tensor.numel() - 1
    if not tensor.is_contiguous():
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in dimensions)
    needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    if needed > storage.nbytes():
        raise ValueError(
            f"{what} has {storage.nbytes()} bytes of memory, expected at least {needed}:"
            " its storage was freed or resized"
        )


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor to read into, of any dtype.

    As bytes at first: under torch.use_deterministic_algorithms torch.empty fills what it makes, and
    cannot do that with every dtype.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype).view(shape)


class Memory:
    """The memory of a tensor while a transfer uses it, which nobody else may free, resize or move.

    Whoever has the storage can do that all the same (`untyped_storage().resize_`, which FSDP calls,
    or `share_memory_`), and the transfer does not notice.

    Args:
        tensor: as the transfer uses it; kept alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._place = _place(tensor)

    def check(self, what: str) -> None:
        """Raise OSError EFAULT if the memory is another than it was; `what` used it."""
        place = _place(self.tensor)
        if place == self._place:
            return
        (got_at, got), (at, nbytes) = place, self._place
        raise OSError(
            errno.EFAULT,
            f"aio: tensor of {what} (shape {list(self.tensor.shape)}, {self.tensor.dtype}) has"
            f" {got} bytes of memory at {got_at:#x}, expected {nbytes} at {at:#x} to its end: its"
            " storage was freed, resized or moved meanwhile, and the bytes are undefined",
        )


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor and the bytes of its storage; zeros if it has no elements."""
    if tensor.numel() == 0:
        return 0, 0
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def as_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return address and number of bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def bytes_of(tensor: Tensor) -> bytes:
    """Return a copy of the memory of a contiguous CPU tensor."""
    return ctypes.string_at(*as_bytes(tensor))


def byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, (bytes,), uint8, without its autograd.

    Not by `view`, which refuses a single element whose stride, of which nothing depends, is not 1.
    """
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor's values in a row: itself when they already are, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Tell whether the memory of a tensor is its values, in a row."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two elements may share memory, as in an expanded tensor."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    reach = 0
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(item for item in dimensions if item[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
