"""safe_get and safe_set of deepspeed.utils: whole and local weights, gradients and state.

Weights and state are float32. There are none of what no engine's optimizer steps, such as of frozen
parameters. Engines are those of `compat.initialize`: others belong to nothing of the whole process,
where these functions could find them.

All processes call the ones for whole tensors together. A gradient is there from the last backward
of a step to the step, and with fp16 it is that of the scaled loss.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deepspeed_ext.compat.engine import optimizer_of
from deepspeed_ext.dtensors import full, is_dtensor, local, part_for, spread
from deepspeed_ext.offload.summed_gradient import gradient_of, set_gradient
from deepspeed_ext.ops.optimizers.state_formats import join_float32, split_float32
from deepspeed_ext.optim.formats import MASTER, REMAINDER


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole master weight in float32, or None."""
    return _whole(_master(param)) if _is_stepped(param) else None


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole gradient in float32, or None."""
    return _whole(gradient_of(optimizer_of(param), param))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a whole entry of the optimizer's state in float32, or None."""
    return _whole(_entry(param, optim_state_key))


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this process's part of the master weight, or None."""
    return _part(_master(param)) if _is_stepped(param) else None


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this process's part of the gradient."""
    return _part(gradient_of(optimizer_of(param), param))


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this process's part of an entry of the optimizer's state."""
    return _part(_entry(param, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write a whole master weight, of which each process takes its part."""
    _write("safe_set_full_fp32_param", param, value, is_whole=True)
    _write_master(param, value, is_whole=True)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Write a whole gradient."""
    _write_gradient("safe_set_full_grad", param, value, is_whole=True)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write a whole entry of the optimizer's state."""
    entry = _entry(param, optim_state_key)
    _write("safe_set_full_optimizer_state", entry, value, is_whole=True)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write this process's part of the master weight."""
    _write("safe_set_local_fp32_param", param, value, is_whole=False)
    _write_master(param, value, is_whole=False)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Write this process's part of the gradient."""
    _write_gradient("safe_set_local_grad", param, value, is_whole=False)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write this process's part of an entry of the optimizer's state."""
    entry = _entry(param, optim_state_key)
    _write("safe_set_local_optimizer_state", entry, value, is_whole=False)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Write what a function makes of each whole gradient; parameters without one are left out.

    Args:
        param_list: of an engine; the same in all processes.
        update_func: of a whole gradient in float32 and its parameter; returns the other one.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _is_stepped(param: Tensor) -> bool:
    """Tell whether there is a master weight; optimizers are given frozen ones, too."""
    return param.requires_grad and optimizer_of(param) is not None


def _entry(param: Tensor, key: str) -> Tensor | None:
    optimizer = optimizer_of(param)
    entry: Tensor | None = None if optimizer is None else optimizer.state.get(param, {}).get(key)
    return entry


def _master(param: Tensor) -> Tensor:
    """Return what has all bits of a weight: it itself, or its master weight.

    Where a weight was written since, the next step makes its master weight anew.
    """
    master, lower = _entry(param, MASTER), _entry(param, REMAINDER)
    kept = lower if master is None else master
    if kept is None:
        return param
    part = local(param.detach()).to(local(kept).device)
    if master is None:
        found = join_float32(part, local(kept))
    else:
        found = torch.where(local(kept).to(part.dtype) == part, local(kept), part.float())
    return spread(found, param) if is_dtensor(param) else found


def _write_master(param: Tensor, value: Tensor, is_whole: bool) -> None:
    """Write the bits that a weight of 16 bits, which is written already, has no room for."""
    master, lower = _entry(param, MASTER), _entry(param, REMAINDER)
    with torch.no_grad():
        if master is not None:
            part = part_for(value, param) if is_whole else value
            local(master).copy_(part)
        elif lower is not None:
            part = part_for(value, param) if is_whole else value
            upper, rest = split_float32(part.float())
            local(param).copy_(upper)
            local(lower).copy_(rest)


def _whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()  # of a shard that is shown whole, that
    whole = full(tensor) if is_dtensor(tensor) else tensor
    return whole.to(torch.float32, copy=True)


def _part(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor.detach()).to(torch.float32, copy=True)


def _write_gradient(op: str, param: Tensor, value: Tensor, is_whole: bool) -> None:
    to = _checked(op, param.grad, value, is_whole)
    part = part_for(value, to) if is_whole else value
    if not set_gradient(optimizer_of(param), param, part):
        _write(op, to, value, is_whole)


def _write(op: str, to: Tensor | None, value: Tensor, is_whole: bool) -> None:
    """Write through the tensor itself, so that others see that it was written."""
    to = _checked(op, to, value, is_whole)
    with torch.no_grad():
        value = value.to(local(to).device, to.dtype)
        part = part_for(value, to) if is_whole else value
        to.copy_(spread(part, to) if is_dtensor(to) else part)


def _checked(op: str, to: Tensor | None, value: Tensor, is_whole: bool) -> Tensor:
    if to is None:
        raise ValueError(
            f"{op}: param has no such value, expected one of an engine's optimizer, after a"
            " backward for gradients, and a step for state"
        )
    wanted = list((to if is_whole else local(to)).shape)
    if list(value.shape) != wanted:
        raise ValueError(f"{op}: value has shape {list(value.shape)}, expected {wanted}")
    return to
