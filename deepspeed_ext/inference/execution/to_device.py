"""Numbers on their way to a device, without the host waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ready_to_send(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers in the host's memory, from which a copy to the device is only queued.

    Copies from memory that is not pinned wait for what the stream has before them, so that nothing
    is queued meanwhile. Pinned memory is not used again before such a copy has read it.
    """
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
