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


def on_gradient(param: Tensor, tell: Callable[[Tensor], None]) -> Remove:
    """Call a method with a parameter whose gradient has been accumulated."""
    method = weakref.WeakMethod(tell)

    @_disable_dynamo
    def hook(param: Tensor) -> None:
        told = method()
        if told is not None:
            told(param)

    return param.register_post_accumulate_grad_hook(hook).remove


def before_forward(model: torch.nn.Module, tell: Callable[[list[Tensor]], None]) -> list[Remove]:
    """Call a method with the parameters that a module is about to use, or to save.

    Modules tell of their own parameters one by one. A compiled module, and one with DTensors, which
    FSDP2 gathers ahead of time, tell of all that they hold as soon as they begin.
    """
    method = weakref.WeakMethod(tell)
    removes: list[Remove] = []

    def watch(module: torch.nn.Module, recurse: bool) -> None:
        if not any(True for _ in module.parameters(recurse=recurse)):
            return

        @_disable_dynamo
        def hook(module: torch.nn.Module, args: Any) -> None:
            told = method()
            if told is not None:
                told(list(module.parameters(recurse=recurse)))

        def before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
            told = method()
            if told is not None:
                told(list(module.parameters()))

        removes.append(module.register_forward_pre_hook(hook, prepend=True).remove)
        removes.append(module.register_state_dict_pre_hook(before_state_dict).remove)

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
