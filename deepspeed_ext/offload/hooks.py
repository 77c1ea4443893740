"""What tells the optimizer of gradients that have appeared, and of modules that want weights.

Hooks only start work sooner: they hold no reference to the optimizer, which is right without them.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.collector import end_outside, is_collecting
from deepspeed_ext.dtensors import is_dtensor, rests_on_host
from deepspeed_ext.offload.streamed import Take, home_of, is_beside
from deepspeed_ext.torch_internals.compiler import untraced
from deepspeed_ext.torch_internals.modules import is_compiled, is_compiled_in_place, pre_hooks_of
from deepspeed_ext.torch_internals.tensors import is_watched_in_backward

Remove = Callable[[], None]
_WITH_FAST_PATHS = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
)


class Told(Protocol):
    """Who is told of gradients; see pipeline.Pipeline."""

    def note_gradient(self, param: Tensor) -> None:
        """Take note of one that was accumulated."""

    def take_gradient(self, param: Tensor, grad: Tensor) -> bool:
        """Take one of a streamed parameter, if it can be taken."""


class OfProcess(Protocol):
    """What belongs to one process; see worker.Worker."""

    def is_foreign(self) -> bool:
        """Return whether this is a fork of it."""


class Ending(Protocol):
    """What has something under way; see pipeline.Pipeline."""

    @property
    def worker(self) -> OfProcess:
        """Does it."""

    def end(self) -> None:
        """Wait until all is over."""


class _Tell:
    """A hook that calls a method, while its object is there; a copy or a pickle of it is nothing's.

    Args:
        method: to be called.
        recurse: of a module, all parameters in it are meant, not only its own.
    """

    def __init__(self, method: Callable[..., Any], recurse: bool = False) -> None:
        self._method: Callable[[], Callable[..., Any] | None] = weakref.WeakMethod(method)
        self._recurse = recurse

    @untraced
    def of_gradient(self, param: Tensor) -> None:
        """Tell of a parameter."""
        told = self._method()
        if told is not None:
            told(param)

    @untraced
    def of_module(self, module: torch.nn.Module, *_: Any) -> None:
        """Tell of the parameters of a module."""
        told = self._method()
        if told is not None:
            # Their fast paths, of inference, are not taken with a child's weight on its way.
            whole = isinstance(module, _WITH_FAST_PATHS) and not module.training
            told(list(module.parameters(recurse=self._recurse or whole)))

    def of_streamed(self, param: Tensor, grad: Tensor) -> bool:
        """Tell of a streamed parameter and its gradient, and return whether it is taken."""
        told = self._method()
        return told is not None and told(param, grad)

    @property
    def is_over(self) -> bool:
        """Whether its object is gone."""
        return self._method() is None

    def __reduce__(self) -> tuple[Any, ...]:
        return _tell_nobody, ()

    def __deepcopy__(self, memo: Any) -> "_Tell":
        return _tell_nobody()


class _Nobody:
    def told(self, _: Any) -> None:
        """Do nothing: and this object is gone at once."""


def _tell_nobody() -> _Tell:
    return _Tell(_Nobody().told)


def watch(
    hooks: dict[Tensor, Remove],
    params: Iterable[Tensor],
    told: Told,
    free_grads: bool,
    has_disk: bool,
) -> None:
    """See that parameters tell of their gradients, those added or thawed since too.

    Args:
        hooks: of those that do; of those that are no longer there, they are removed.
        params: all that there are.
        told: of gradients.
        free_grads: those of streamed parameters are taken from the device.
        has_disk: all tell, as state comes from the disk meanwhile. Else those do not that rest in
            host memory: nothing goes ahead, and FSDP2 would wait for each gradient to tell of it.
    """
    take = told.take_gradient if free_grads else None
    known = dict.fromkeys(params)
    for gone in hooks.keys() - known.keys():
        hooks.pop(gone)()
    for param in known:
        has_memory = not (is_lazy(param) or param.is_meta)
        # What swaps tensors, as FSDP2's `to` does, takes hooks away with the old one.
        watched = param in hooks and _is_watched(param)
        is_wanted = has_memory and param.requires_grad and param.is_leaf and not watched
        if is_wanted and (has_disk or not rests_on_host(param)):
            hooks[param] = on_gradient(param, told.note_gradient, take)


def on_gradient(param: Tensor, tell: Callable[[Tensor], None], take: Take | None) -> Remove:
    """Call a method with a parameter whose gradient has been accumulated.

    Args:
        param: the parameter.
        tell: is called with it.
        take: is called instead with it, if it is streamed, and with a gradient that is still on the
            device; None: nothing is.
    """
    home = home_of(param)
    if take is not None and home is not None:
        home.hand_over(param, _Tell(take).of_streamed)
        return partial(home.hand_over, param, None)
    remove: Remove = param.register_post_accumulate_grad_hook(_Tell(tell).of_gradient).remove
    return remove


def _is_watched(param: Tensor) -> bool:
    """Tell whether a gradient of this parameter is told of."""
    home = home_of(param)
    return is_watched_in_backward(param) or (home is not None and home.hands_over(param))


def check_model(op: str, model: torch.nn.Module | None) -> None:
    """Raise TypeError if a module in a model can tell of nothing, and reads weights unseen."""
    jit: Any = torch.jit  # whose stubs leave the class out
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, jit.RecursiveScriptModule):
            what = f"model has {name!r}, a module" if name else "model is one"
            raise TypeError(
                f"{op}: {what} of TorchScript, which reads weights that are on their way, expected"
                " modules of Python; leave model out, and step() waits for all weights"
            )


def before_forward(model: torch.nn.Module, tell: Callable[[list[Tensor]], None]) -> list[Remove]:
    """Call a method with the parameters that a module is about to use, or to save.

    Modules tell of their own parameters one by one. What does not call the modules in it as they
    are tells of all that it holds as soon as it begins: a compiled module, a traced one, and
    one with DTensors, which FSDP2 gathers ahead of time.
    """
    removes: list[Remove] = []
    for module in model.modules():
        _remove_dead_hooks(module)

    def watch(module: torch.nn.Module, recurse: bool) -> None:
        saved = _Tell(tell, recurse=True).of_module
        removes.append(module.register_state_dict_pre_hook(saved).remove)
        if any(True for _ in module.parameters(recurse=recurse)):
            used = _Tell(tell, recurse).of_module
            removes.append(module.register_forward_pre_hook(used, prepend=True).remove)

    def visit(module: torch.nn.Module) -> None:
        if _has_own_call(module):
            watch(module, recurse=True)
        elif any(is_dtensor(param) for param in module.parameters()):
            for block in dict.fromkeys((module, *filter(_is_sharded_block, module.modules()))):
                watch(block, recurse=True)
        else:
            watch(module, recurse=False)
            for child in module.children():
                visit(child)

    visit(model)
    return removes


def _remove_dead_hooks(module: torch.nn.Module) -> None:
    """Take away those of optimizers that the garbage collector took; see `let_go`."""
    for hooks in pre_hooks_of(module):
        for number, hook in list(hooks.items()):
            tell = getattr(hook, "__self__", None)
            if isinstance(tell, _Tell) and tell.is_over:
                del hooks[number]


def _is_sharded_block(module: torch.nn.Module) -> bool:
    """Return whether this is called by itself, perhaps, and gathers what is in it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _has_own_call(module: torch.nn.Module) -> bool:
    """Return whether hooks of the modules in this one are compiled, or not called at all."""
    compiled = is_compiled(module) or is_compiled_in_place(module)
    return compiled or isinstance(module, torch.jit.ScriptModule)


def is_final_in_hook(param: Tensor, free_grads: bool) -> bool:
    """Return whether a gradient is final when its hook fires: DDP writes to it after that.

    What is written to one that has left is lost, so with free_grads none of those leaves early.
    """
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    if alone or is_dtensor(param):
        return True
    is_early = not free_grads or is_beside(param)
    return is_early and torch.distributed.get_world_size() == 1


def let_go(pipeline: Ending, hooks: dict[Tensor, Remove], waiting: list[Remove]) -> None:
    """Have nothing call an optimizer that is closed or gone, and end what it has started.

    If the garbage collector calls this, hooks of modules stay, and tell nobody: torch goes through
    them as they are, and the collector may run in the middle of that. The next optimizer of the
    model takes them away. And the end, which waits for threads, is left to a thread: this one may
    be among those, or be inside a hook that holds a lock which they want.

    Args:
        pipeline: of the optimizer. A fork has nothing to wait for.
        hooks: of parameters; autograd copies the list of these before it calls them.
        waiting: hooks of modules.
    """
    for remove in hooks.values():
        remove()
    hooks.clear()
    if not is_collecting():
        for remove in waiting:
            remove()
    waiting.clear()
    if pipeline.worker.is_foreign():
        pipeline.end()
    else:
        end_outside(pipeline.end)
