"""checkpoint: torch's, with its inputs kept elsewhere."""

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext.offload.activations.saved_tensors import SavedTensors


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    device: SavedTensors,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
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
        mesh: of one dimension, whose processes call this with equal inputs, as those of tensor
            parallelism do. Each keeps its part of each input that has a graph, and all gather it
            when it is wanted. Nobody looks whether inputs are equal. What has no graph stays whole:
            a mask of all blocks would be gathered for each. With device of budget 0 parts stay on
            the device.
        kwargs: of torch.utils.checkpoint.checkpoint, such as preserve_rng_state and context_fn, and
            of the function, which keep their tensors where they are.

    Returns:
        What the function returned.

    Raises:
        TypeError: device or mesh is something else.
        ValueError: use_reentrant is not False, or mesh is not of one dimension, or of others.
    """
    if not isinstance(device, SavedTensors):
        raise TypeError(
            f"checkpoint: device is {device!r}, expected what offload.saved_tensors returns, one"
            " for all calls"
        )
    if kwargs.pop("use_reentrant", False):
        raise ValueError("checkpoint: use_reentrant is True, expected False")
    if mesh is not None:
        _check(mesh)
    with device if mesh is None or mesh.size() == 1 else device.shared_over(mesh):
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _check(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"checkpoint: mesh is {mesh!r}, expected a DeviceMesh or None")
    if mesh.ndim != 1:
        raise ValueError(f"checkpoint: mesh has {mesh.ndim} dimensions, expected 1")
    if mesh.get_coordinate() is None:
        raise ValueError(f"checkpoint: mesh is {mesh}, expected one with this process")
