"""A step of torch's optimizers as those of this package take it: unscale, clip, step."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor, local, sum_over_shards


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
    of_meshes: dict[DeviceMesh | None, list[Tensor]] = {}  # torch counts those of one at a time,
    is_there = True  # and only where that mesh is
    for param in params:
        mesh = param.grad.device_mesh if is_dtensor(param.grad) else None
        of_meshes.setdefault(mesh, []).append(param)
        is_there = is_there and (mesh is None or local(param.grad).device.type == mesh.device_type)
    grads = [param.grad for param in params]
    torch_can = len(of_meshes) < 2 and is_there
    norm = nn.utils.get_total_norm(grads) if torch_can else _norm_over_meshes(grads)
    whole = norm.full_tensor() if is_dtensor(norm) else norm
    if not skips or whole.isfinite():
        if max_norm < math.inf:  # else an inf of one gradient would be NaN in all
            for of_one in of_meshes.values():
                nn.utils.clip_grads_with_norm_(of_one, max_norm, norm)
        optimizer.step()
    return whole


def _norm_over_meshes(grads: list[Tensor]) -> Tensor:
    norms = torch.stack(torch._foreach_norm(list(map(local, grads)))).double()
    return sum_over_shards(norms.square(), grads).sum().sqrt()
