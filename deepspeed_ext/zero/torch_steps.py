"""A step of torch's optimizers as those of this package take it: unscale, clip, step."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor, local


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    scale: Tensor | None = None,
    skips: bool | None = None,
) -> Tensor:
    """Divide the gradients by a scale, clip them by their global norm, and step.

    All processes that hold shards of the parameters call it.

    Args:
        optimizer: any.
        max_norm: the largest norm to leave as it is; inf: do not clip.
        scale: that the loss was multiplied by; None: none.
        skips: take no step if the norm is inf or NaN, for which the host waits; False: step with
            whatever gradients there are. None: if there is a scale.

    Returns:
        The norm before clipping. If it skips, inf or NaN if and only if nothing was stepped.
    """
    skips = scale is not None if skips is None else skips
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scale is not None:
        for param in params:
            local(param.grad).div_(scale)
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}  # torch counts those of one at a time
    for param in params:
        mesh = param.grad.device_mesh if is_dtensor(param.grad) else None
        by_mesh.setdefault(mesh, []).append(param)
    norms = [_norm_of(of_one) for of_one in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    if not skips or norm.isfinite():
        if max_norm < math.inf:  # else an inf of one gradient would be NaN in all
            for of_one in by_mesh.values():
                nn.utils.clip_grads_with_norm_(of_one, max_norm, norm)
        optimizer.step()
    return norm


def _norm_of(params: list[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    return norm.full_tensor() if is_dtensor(norm) else norm
