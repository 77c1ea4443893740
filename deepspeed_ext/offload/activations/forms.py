"""What a tensor looks like in its storage, and how it is told that it has been written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ext.torch_internals.tensors import base_of, version_of

ALIGNMENT = 16  # bytes; that of complex numbers of two doubles


class Form(NamedTuple):
    """Where in some bytes the elements of a tensor are.

    Attributes:
        dtype: of the tensor.
        size: likewise.
        stride: likewise.
        begin: byte of the first element.
        is_conjugate: whether it is the conjugate of what is there.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    begin: int
    is_conjugate: bool

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in bytes, with the version counter of these."""
        width = self.dtype.itemsize
        with torch.no_grad():
            flat = memory[: memory.numel() // width * width].view(self.dtype)
            made = flat.as_strided(self.size, self.stride, self.begin // width)
            return (made.conj() if self.is_conjugate else made).detach()


def form_of(tensor: Tensor) -> Form:
    """Return where in its storage the elements of a tensor are."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return Form(tensor.dtype, tensor.size(), tensor.stride(), begin, tensor.is_conj())


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor with elements begins in its storage, and the byte behind its end.

    The beginning is one for elements of every dtype.
    """
    width = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return first * width // ALIGNMENT * ALIGNMENT, (last + 1) * width


def storage_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return bytes of the storage of a tensor, which they share."""
    made: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    shared: Tensor = made.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))
    return shared


def is_kept_by_user(tensor: Tensor) -> bool:
    """Tell whether this is a parameter, a leaf that gets a gradient, or a view of one."""
    base = base_of(tensor)
    whole = tensor if base is None else base
    return isinstance(whole, Parameter) or (whole.is_leaf and whole.requires_grad)


def can_leave(tensor: Tensor, kind: type[Tensor] = Tensor) -> bool:
    """Tell whether a tensor is one of those that leave, whatever its storage has.

    Args:
        tensor: to look at.
        kind: of tensors that do.
    """
    if type(tensor) is not kind or tensor.layout != torch.strided:
        return False  # parameters, DTensors, and what has no memory of its own
    devices = ("cpu", "cuda") if kind is Tensor else ("cpu", "cuda", "meta")
    if tensor.device.type not in devices or tensor.is_quantized or tensor.is_neg():
        return False
    return bool(tensor.numel()) and not is_kept_by_user(tensor)


class Counter:
    """How often a tensor was written, also when that is gone.

    Args:
        tensor: whose memory is not held.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shared = (tensor.conj() if tensor.is_conj() else tensor).detach()
        self._shared.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.version = version_of(tensor)
        self._shape = tensor.shape

    def check(self) -> None:
        """Raise RuntimeError, as torch does, if the tensor was written since."""
        check_version(self._shared, self.version, self._shape)


def check_version(tensor: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raise RuntimeError, as torch does, if a tensor has another version.

    Args:
        tensor: to look at.
        version: what it had.
        shape: to name in the text; None: its own.
    """
    now = version_of(tensor)
    if now != version:
        shape = tensor.shape if shape is None else shape
        what = f"{tensor.dtype} {list(shape)} on {tensor.device}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: [{what}] is at version {now}; expected version {version} instead. Hint:"
            " torch.autograd.set_detect_anomaly(True) tells which operation saved it"
        )
