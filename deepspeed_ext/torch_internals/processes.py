"""What is known of a process only inside of torch: its default group, its contexts on GPUs."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# Whether this process has a context on a device, without making one; None in a torch that was built
# without CUDA.
has_cuda_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)


def default_store() -> "Store":
    """Return the store of the default group, to make groups that torch does not know.

    Init_process_group makes it and gives it to nobody.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of a group on a device, None if it has none.

    It can be set when a group is made, and not be asked.
    """
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
