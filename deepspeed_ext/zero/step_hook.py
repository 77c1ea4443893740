"""The hook by which sharded models hear of the steps of optimizers."""

import threading
from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed_ext.torch_internals.compiler import untraced

Listener = Callable[[torch.optim.Optimizer], None]

_lock = threading.Lock()
_listeners: tuple[WeakMethod[Listener], ...] | None = None  # None: there is no hook yet


def call_before_steps(method: Listener) -> None:
    """Call a method before each step of each optimizer, while its object is there.

    One hook serves all and stays: an object may go as garbage while torch goes through its hooks,
    which may not change then. For the same reason listeners are exchanged, and not changed.

    Args:
        method: takes the optimizer; an error of it ends the step.
    """
    global _listeners
    with _lock:
        if _listeners is None:
            register_optimizer_step_pre_hook(_before_step)
        alive = (each for each in _listeners or () if each() is not None)
        _listeners = (*alive, WeakMethod(method))


@untraced
def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in _listeners or ():
        method = listener()
        if method is not None:
            method(optimizer)
