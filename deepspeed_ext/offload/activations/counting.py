"""How much would leave: forward without memory, whose saved tensors are counted."""

from typing import Any

import torch
from torch import Tensor


class _Gone:
    """What has left at once."""

    source: Tensor | None = None

    def has_ended(self) -> bool:
        """Return True."""
        return True

    def let_go(self) -> None:
        """Do nothing."""


class _Counted:
    """Bytes that rest nowhere; see host.HostBytes."""

    leaving = _Gone()

    def fetch(self) -> Any:
        """Raise RuntimeError: nothing has been kept."""
        raise RuntimeError(
            "saved_tensors.estimate: the function calls backward, expected forward alone"
        )


class NoPlace:
    """Keeps nothing; see host.HostPlace."""

    def take(self, source: Tensor) -> _Counted:
        """Return what cannot be fetched."""
        return _Counted()


def call_without_memory(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on tensors without memory, with gradients, and return what it returns."""
    from deepspeed_ext.torch_internals.fakes import without_memory  # which is slow to import

    # Autocast keeps weights that it has cast, and would give those without memory to others.
    torch.clear_autocast_cache()
    try:
        with torch.enable_grad(), without_memory(args, kwargs) as (fake_args, fake_kwargs):
            return function(*fake_args, **fake_kwargs)
    finally:
        torch.clear_autocast_cache()
