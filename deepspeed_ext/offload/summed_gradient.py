"""What a gradient is that has left the device, for who wants to see it before the step."""

import torch
from torch import Tensor

from deepspeed_ext.offload.host_gradients import Sum
from deepspeed_ext.offload.optimizer import OffloadOptimizer
from deepspeed_ext.offload.sent_gradients import sent
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


def _sum(optimizer: OffloadOptimizer, known: Sum) -> Tensor:
    if known.last is not None:
        optimizer._pipeline.worker.wait([known.last])
    known.check()
    return known.value.to(torch.float32, copy=True)
