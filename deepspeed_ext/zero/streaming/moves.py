"""Moves of a model, as `model.to` makes them: what rests stays where it is."""

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.offload.host_tensors import Memory
from deepspeed_ext.torch_internals.modules import APPLY
from deepspeed_ext.zero.streaming.rest import bring_to_rest

Change = Callable[[Tensor], Tensor]


class _Apply:
    """What a module does to its tensors, but for those that rest: they get another dtype only.

    A copy or a pickle of it does that to all.

    Args:
        module: whose method it stands in for.
        rests: tells of a parameter whether it does.
        memory_for: returns memory to rest in.
    """

    def __init__(
        self, module: nn.Module, rests: Callable[[Tensor], bool], memory_for: Memory
    ) -> None:
        self._module = weakref.ref(module)
        self._rests, self._memory_for = rests, memory_for

    def __call__(self, change: Change, *rest: Any, **options: Any) -> nn.Module:
        module = self._here()
        own = [param for param in module.parameters(recurse=False) if self._rests(param)]
        tensors = {id(t) for param in own for t in (param, param.grad) if t is not None}

        def changed(tensor: Tensor) -> Tensor:
            if id(tensor) not in tensors:
                return change(tensor)
            like = change(torch.empty(0, dtype=tensor.dtype, device="cpu"))
            return change(tensor) if like.device.type == "cpu" else tensor.to(like.dtype)

        before = [param.data_ptr() for param in own]
        made: nn.Module = getattr(type(module), APPLY)(module, changed, *rest, **options)
        both = zip(own, before, strict=True)
        moved = [param for param, address in both if param.data_ptr() != address]
        bring_to_rest(moved, self._memory_for)
        return made

    def _here(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it holds this object
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_class, (self._here(),)


def _of_class(module: nn.Module) -> MethodType:
    return MethodType(getattr(type(module), APPLY), module)


def keep_at_rest(
    module: nn.Module, rests: Callable[[Tensor], bool], memory_for: Memory
) -> Callable[[], None]:
    """Let moves of a module leave its own parameters that rest; return what ends that."""
    module.__dict__[APPLY] = made = _Apply(module, rests, memory_for)
    reference = weakref.ref(module)

    def end() -> None:
        known = reference()
        if known is not None and known.__dict__.get(APPLY) is made:
            del known.__dict__[APPLY]

    return end
