"""What a gradient is that has left the device, for who sees it, or writes it, before the step."""

import torch
from torch import Tensor

from deepspeed_ext.offload.host_gradients import Sum
from deepspeed_ext.offload.optimizer import OffloadOptimizer
from deepspeed_ext.offload.sent_gradients import sent
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.torch_internals.tensors import past_torch_function


@torch.no_grad()
def gradient_of(optimizer: torch.optim.Optimizer | None, param: Tensor) -> Tensor | None:
    """Return the gradient that the next step takes, or None.

    Args:
        optimizer: of any class.
        param: that it has, perhaps.

    Returns:
        `param.grad`, or where free_grads has taken that, the sum in host memory, a copy in float32.
    """
    with past_torch_function():
        left = sent(param.grad)
        if left is None or not isinstance(optimizer, OffloadOptimizer):
            return param.grad
        row = optimizer._pipeline.table.get(param)
        known = None if row is None else row.sum
        if known is None:
            return param.grad
        more = known.more() if known.has_more() else None
        more = None if more is None else more.to("cpu", torch.float32)
        if left.since.is_dropped:
            return more
        added = _sum(optimizer, known)
        return added if more is None else added + more


@torch.no_grad()
def set_gradient(optimizer: torch.optim.Optimizer | None, param: Tensor, part: Tensor) -> bool:
    """Let the next step take another gradient, where free_grads has taken it.

    It keeps all bits of float32 where there are master weights, or a sum of several; else those of
    the parameter's dtype.

    Args:
        optimizer: of any class.
        param: that it has, perhaps.
        part: what this process holds of the gradient.

    Returns:
        Whether it is so; else `param.grad` is to be written.
    """
    with past_torch_function():
        left = sent(param.grad)
        if left is None or not isinstance(optimizer, OffloadOptimizer):
            return False
        row = optimizer._pipeline.table.get(param)
        known = None if row is None else row.sum
        if known is None:
            return False
        keys = optimizer._host_optimizer.state_format.dtypes((), param.dtype)
        is_wide = known.count > 1 or not {MASTER, REMAINDER}.isdisjoint(keys)
        dtype = torch.float32 if is_wide else param.dtype
        made = torch.empty_strided(left.shape, left.stride(), dtype=dtype, device=left.device)
        left.since.is_dropped, left.since.value = True, made.copy_(part)
        return True


def _sum(optimizer: OffloadOptimizer, known: Sum) -> Tensor:
    if known.last is not None:
        optimizer._pipeline.worker.wait([known.last])
    known.check()
    return known.value.to(torch.float32, copy=True)
