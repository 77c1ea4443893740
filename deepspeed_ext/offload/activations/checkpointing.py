"""checkpoint: torch's, with its inputs kept elsewhere."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext.offload.activations.saved_tensors import SavedTensors


def checkpoint(
    function: Callable[..., Any], *args: Any, device: SavedTensors, **kwargs: Any
) -> Any:
    """Call a function, and call it again in backward in place of keeping what it has saved.

    It is torch's checkpoint, without reentrance: but its inputs leave the device until backward
    wants them. Within `saved_tensors` torch's own function does the same, for all that are outside
    of checkpoints too.

    Args:
        function: to call.
        args: of the function; tensors among them leave as `saved_tensors` has it.
        device: where they go: what `saved_tensors` returned. Give all checkpoints the same one:
            inputs come back ahead of backward, and memory is used again.
        kwargs: of torch.utils.checkpoint.checkpoint, such as preserve_rng_state and context_fn, and
            of the function, which keep their tensors where they are.

    Returns:
        What the function returned.

    Raises:
        TypeError: device is something else.
        ValueError: use_reentrant is not False.
    """
    if not isinstance(device, SavedTensors):
        raise TypeError(
            f"checkpoint: device is {device!r}, expected what offload.saved_tensors returns, one"
            " for all calls"
        )
    if kwargs.pop("use_reentrant", False):
        raise ValueError("checkpoint: use_reentrant is True, expected False")
    with device:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
