"""The weights of experts that are in this process, where they enter its computation."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor


def local_weight(param: Tensor) -> Tensor:
    """Return the experts that are here of a stacked parameter; one that is not cut as it is.

    An expert gets the tokens of all processes of its mesh, and so the sum of their gradients, where
    all other parameters get the mean over processes. The gradient is divided by the number of
    processes, which makes it that mean.

    Args:
        param: a plain tensor, or a DTensor with Shard(0) over a mesh of one dimension.
    """
    if not is_dtensor(param):
        return param
    here: Tensor = _Divide.apply(param.to_local(), param.device_mesh.size())
    return here


class _Divide(torch.autograd.Function):
    """Divides the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: int) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None
