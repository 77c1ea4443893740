"""Small things that scripts import from deepspeed.utils, runtime.utils and checkpoint.utils."""

import contextlib
import enum
import logging
import random
import resource
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.dtensors import full, is_dtensor

logger = logging.getLogger("deepspeed_ext")
_orig_torch_arange = torch.arange  # of a library that puts it back


class OffloadDeviceEnum(str, enum.Enum):
    """Where optimizer state or parameters rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class RepeatingLoader:
    """An iterator over a loader that begins anew where it ends; an empty one ends at once."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message in these processes, -1 for all; None: in process 0."""
    wanted = [0] if ranks is None else list(ranks)
    if -1 in wanted or _rank() in wanted:
        logger.log(level, "[rank %d] %s", _rank(), message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what memory there is in use in process 0, if force is True."""
    if not force or _rank() != 0:
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    text = f"{message}: the process has had {peak:.2f} GiB at most"
    if torch.cuda.is_available():
        used, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        text += f", tensors on the GPU have {used / 2**30:.2f} GiB, at most {most / 2**30:.2f}"
    logger.info(text)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy if it is there, and torch on all devices."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)


def _mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of tensors in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, list | tuple):
        made = [_mapped(each, change) for each in item]
        return type(item)(*made) if hasattr(item, "_fields") else type(item)(made)
    if isinstance(item, dict):
        return type(item)({key: _mapped(value, change) for key, value in item.items()})
    return item


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return tensors in lists, tuples and dicts on a device; those that the criterion takes."""
    return _mapped(
        item, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t
    )


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return copies of tensors in lists, tuples and dicts; those of shards are whole.

    All processes call it, with the same item.
    """

    def copied(tensor: Tensor) -> Tensor:
        whole = tensor.detach()
        whole = full(whole) if is_dtensor(whole) else whole
        return whole.to(device, copy=True)

    return _mapped(item, copied)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """Let tensors that are made inside be of a dtype and on a device."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: torch.profiler sees it anyway."""
    return function


def zero_wrapper_for_fp_tensor_constructor(
    function: Callable[..., Any], dtype: torch.dtype
) -> Callable[..., Any]:
    """Return the function: nothing here replaces the constructors of tensors."""
    return function
