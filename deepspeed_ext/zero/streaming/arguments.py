"""What zero.stream is given, checked."""

import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.offload.host_tensors import host_bytes
from deepspeed_ext.zero.streaming.rest import OP


def checked_folder(device: str, path: str | bytes | os.PathLike[str] | None) -> str | None:
    """Return the folder of a file to rest in; None: memory.

    Raises:
        ValueError, TypeError: it does not go with the device, or is none.
    """
    if device not in ("cpu", "nvme"):
        raise ValueError(f"{OP}: device is {device!r}, expected 'cpu' or 'nvme'")
    if device == "cpu" and path is not None:
        raise ValueError(f"{OP}: nvme_path is given, expected device='nvme' with it")
    if device == "cpu":
        return None
    if path is not None and not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{OP}: nvme_path is {type(path).__name__}, expected a folder's path")
    if path is None or not os.fspath(path):
        raise ValueError(f"{OP}: nvme_path is {path!r}, expected a folder with device='nvme'")
    if "\0" in os.fsdecode(path):
        raise ValueError(f"{OP}: nvme_path is {path!r}, expected a path without zero bytes")
    return os.path.abspath(os.fsdecode(path))


def checked_device(to: torch.device | str | None) -> torch.device:
    """Return where a model computes; None: the current GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device, or none to compute on.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = ("cuda" if count else "cpu") if to is None else to
    device: torch.device | None = None
    if isinstance(name, str | torch.device):
        with suppress(RuntimeError):  # no name of a device
            device = torch.device(name)
    if device is not None and device.type == "cpu":
        return torch.device("cpu")
    if device is None or device.type != "cuda":
        raise ValueError(f"{OP}: to is {to!r}, expected a CUDA device or the CPU")
    if (device.index or 0) >= count:
        there = f"one of {count} GPUs" if count else "the CPU, as torch finds no GPU"
        raise ValueError(f"{OP}: to is {str(device)!r}, expected {there}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def kept_in_memory(
    blocks: Sequence[Sequence[Tensor]], budget: int | None, on_disk: bool, most: int
) -> int:
    """Return how many blocks rest in host memory: all, or the first ones of a model on a disk.

    Args:
        blocks: the parameters that rest, of each.
        budget: most bytes of host memory; None: all that it takes, and on a disk as little.
        on_disk: they rest there as far as the budget does not hold them.
        most: how many blocks that come from the disk are in host memory at once.

    Raises:
        ValueError: the budget does not hold what must be there.
    """
    sizes = [host_bytes(params) for params in blocks]
    if budget is None:
        return 0 if on_disk else len(blocks)
    needed, what = sum(sizes), "the weights"
    if budget >= needed:
        return len(blocks)
    if on_disk:
        needed = most * whole_pages(max(sizes, default=0))
        what = f"{most} blocks that are read"
    if not on_disk or budget < needed:
        raise ValueError(f"{OP}: memory_budget is {budget}, expected at least {needed} for {what}")
    left = budget - needed
    for count, size in enumerate(sizes):
        left -= size
        if left < 0:
            return count
    return len(blocks)
