"""What tells the optimizer of gradients that have appeared, and of modules that want weights.

Hooks only hasten: they hold no reference to the optimizer, and it is right without them.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from deepspeed_ext.dtensors import is_dtensor

Remove = Callable[[], None]


class _Tell:
    """A hook that calls a method, while its object is there; a copy or a pickle of it is nothing's.

    Args:
        method: to be called.
        recurse: of a module, all parameters in it are meant, not only its own.
    """

    def __init__(self, method: Callable[[Any], None], recurse: bool = False) -> None:
        self._method: Callable[[], Callable[[Any], None] | None] = weakref.WeakMethod(method)
        self._recurse = recurse

    @_disable_dynamo
    def of_gradient(self, param: Tensor) -> None:
        """Tell of a parameter."""
        told = self._method()
        if told is not None:
            told(param)

    @_disable_dynamo
    def of_module(self, module: torch.nn.Module, *_: Any) -> None:
        """Tell of the parameters of a module."""
        told = self._method()
        if told is not None:
            told(list(module.parameters(recurse=self._recurse)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _tell_nobody, ()

    def __deepcopy__(self, memo: Any) -> "_Tell":
        return _tell_nobody()


class _Nobody:
    def told(self, _: Any) -> None:
        """Do nothing: and this object is gone at once."""


def _tell_nobody() -> _Tell:
    return _Tell(_Nobody().told)


def on_gradient(param: Tensor, tell: Callable[[Tensor], None]) -> Remove:
    """Call a method with a parameter whose gradient has been accumulated."""
    remove: Remove = param.register_post_accumulate_grad_hook(_Tell(tell).of_gradient).remove
    return remove


def before_forward(model: torch.nn.Module, tell: Callable[[list[Tensor]], None]) -> list[Remove]:
    """Call a method with the parameters that a module is about to use, or to save.

    Modules tell of their own parameters one by one. A compiled module, and one with DTensors, which
    FSDP2 gathers ahead of time, tell of all that they hold as soon as they begin.
    """
    removes: list[Remove] = []

    def watch(module: torch.nn.Module, recurse: bool) -> None:
        saved = _Tell(tell, recurse=True).of_module
        removes.append(module.register_state_dict_pre_hook(saved).remove)
        if any(True for _ in module.parameters(recurse=recurse)):
            used = _Tell(tell, recurse).of_module
            removes.append(module.register_forward_pre_hook(used, prepend=True).remove)

    def visit(module: torch.nn.Module) -> None:
        if _is_opaque(module):
            watch(module, recurse=True)
            return
        watch(module, recurse=False)
        for child in module.children():
            visit(child)

    visit(model)
    return removes


def _is_opaque(module: torch.nn.Module) -> bool:
    compiled = type(module).__name__ == "OptimizedModule" or getattr(
        module, "_compiled_call_impl", None
    )
    return bool(compiled) or any(is_dtensor(param) for param in module.parameters())
