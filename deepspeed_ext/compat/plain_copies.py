"""A model as it was before it was sharded, to be filled with whole weights."""

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.torch_internals.modules import forget_compiled
from deepspeed_ext.zero.kinds_of_parameters import NAME, save_pretrained

_LEFT_OUT = (NAME, "__composable_api")  # how the names of attributes begin that sharding has made


def plain_copy(model: nn.Module) -> nn.Module:
    """Return the same modules on the CPU, whose sharded parameters are whole and not filled.

    Modules that were sharded have no hooks in it, as sharding has put some there; others keep
    theirs. What modules refer to is copied, too.
    """
    known: dict[int, Any] = {}
    for module in model.modules():
        cls = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
        known[id(module)] = cls.__new__(cls)
    for tensor in model.parameters():
        known[id(tensor)] = _whole(tensor)
    for module in model.modules():
        for name, value in vars(module).items():
            is_refusal = isinstance(value, partial) and value.func is save_pretrained
            if not (is_refusal or name.startswith(_LEFT_OUT)):
                vars(known[id(module)])[name] = (
                    OrderedDict()
                    if _is_hooks(name) and isinstance(module, FSDPModule)
                    else copy.deepcopy(value, known)
                )
        forget_compiled(known[id(module)])
    made: nn.Module = known[id(model)]
    return made.cpu()


def _whole(param: Tensor) -> nn.Parameter:
    if not is_dtensor(param):
        return copy.deepcopy(param)  # type: ignore[return-value]
    dtype = torch.float32 if param.is_floating_point() else param.dtype
    return nn.Parameter(
        torch.empty(param.shape, dtype=dtype, device="cpu"), requires_grad=param.requires_grad
    )


def _is_hooks(name: str) -> bool:
    return "_hooks" in name and name.startswith("_")
