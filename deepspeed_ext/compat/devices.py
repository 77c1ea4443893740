"""The accelerator of deepspeed.accelerator: CUDA if there is a GPU, else the CPU, by torch."""

import functools
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext import op_builder
from deepspeed_ext.compat.distributed import get_local_rank

_NOTHING_TO_DO = (
    *("empty_cache", "lazy_call", "range_pop", "range_push", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "synchronize"),
)


class Accelerator:
    """The device that processes train on; what is not here is torch.cuda's or torch's.

    Without a GPU it is the CPU, whose memory is what the process has.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._is_cuda = self._name == "cuda"

    def __getattr__(self, name: str) -> Any:
        if not self._is_cuda and name in _NOTHING_TO_DO:
            return lambda *_: None
        for home in (torch.cuda if self._is_cuda else torch.cpu, torch):
            if hasattr(home, name):
                return getattr(home, name)
        raise AttributeError(f"get_accelerator(): {self._name} has no {name!r}")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", or "cuda:0" with an index; the CPU has none."""
        has_index = self._is_cuda and device_index is not None
        return f"cuda:{device_index}" if has_index else self._name

    def current_device(self) -> int:
        """Return the index of the device that is used; of a CPU the local rank."""
        return torch.cuda.current_device() if self._is_cuda else get_local_rank()

    def current_device_name(self) -> str:
        """Return what torch calls the device that is used."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return how many GPUs there are; without, 1."""
        return torch.cuda.device_count() if self._is_cuda else 1

    def is_available(self) -> bool:
        """Return True: there is a CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Tell whether calls return when they are done."""
        return not self._is_cuda

    def communication_backend_name(self) -> str:
        """Return what torch.distributed talks by."""
        return "nccl" if self._is_cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        """Tell whether bf16 can be configured."""
        return True

    def is_fp16_supported(self) -> bool:
        """Tell whether fp16 can be configured."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return what weights may be."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return bytes that tensors have; on a CPU, those that the process has had at most."""
        if self._is_cuda:
            return torch.cuda.memory_allocated(device_index)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    max_memory_allocated = memory_allocated

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Return a tensor in pinned memory; without a GPU, the tensor."""
        return tensor.pin_memory() if self._is_cuda else tensor

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def create_op_builder(self, class_name: str) -> Any:
        """Return an op builder, such as of "CPUAdamBuilder"."""
        return self.get_op_builder(class_name)()

    def get_op_builder(self, class_name: str) -> Callable[[], Any]:
        """Return the class of an op builder."""
        found: Callable[[], Any] = getattr(op_builder, class_name)
        return found


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of the whole process."""
    return Accelerator()
