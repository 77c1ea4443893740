"""Memory for tensors on meta, which stay the same objects: in ties, in groups, in optimizers."""

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor, spread
from deepspeed_ext.torch_internals.tensors import part_of


def allocate(tensor: Tensor, device: torch.device) -> None:
    """Give a parameter or buffer on meta undefined values; of a DTensor, its part only.

    Args:
        tensor: on meta.
        device: where to.
    """
    if is_dtensor(tensor):
        part = torch.empty_like(part_of(tensor), device=device)
        made: Tensor = spread(part, tensor)
    else:
        made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)
