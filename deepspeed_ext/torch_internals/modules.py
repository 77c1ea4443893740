"""What nn.Module and Optimizer keep to themselves: their dictionaries, hooks and calls."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim import Optimizer

# The parameters, buffers and modules of a module itself, by their names: in these a name can be
# looked up, also if None stands there, and filled with no check of what comes. Named_parameters and
# its kin leave out None and what occurs twice, and setattr refuses what is no Parameter.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
# The names of buffers that a state dict has not; register_buffer alone knows.
non_persistent_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
# What `Module.to` and its kin call of each module in a model.
APPLY = nn.Module._apply.__name__
# What nn.DataParallel calls of each module in a model.
REPLICATE = nn.Module._replicate_for_data_parallel.__name__
# Where recurrent modules have their weights once more, in the order of what they call.
FLAT_WEIGHTS = "_flat_weights"
flat_names_of: Callable[[nn.RNNBase], list[str]] = attrgetter("_flat_weights_names")
# The code of `module(...)`, by which frames of calls under way are known.
CALL_CODE = nn.Module._call_impl.__code__
# What the state dict of a module calls that which get_extra_state returns.
EXTRA_STATE = "_extra_state"
# The module inside of what torch.compile returns, and of torch's checkpoint_wrapper: names of
# parameters have them in between.
ORIGINAL = "_orig_mod"
WRAPPED = (ORIGINAL, "_checkpoint_wrapped_module")
# Hooks that see the state dict of a module, and those and all that see a module or change its
# weight; there are functions that add and remove them, none that tells.
STATE_DICT_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *STATE_DICT_HOOKS,
)


def forward_hooks_of(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """Return the hooks of a module's forward, of both kinds; see `HOOKS`."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def result_hooks_of(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """Return the hooks that see what a module's forward returned, or its gradient; likewise."""
    of_gradients = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    return (*module._forward_hooks.values(), *of_gradients)


def pre_hooks_of(module: nn.Module) -> Iterable[dict[int, Callable[..., Any]]]:
    """Return the hooks that come before a module's forward and state dict, to be changed."""
    return module._forward_pre_hooks, module._state_dict_pre_hooks


def global_forward_hooks() -> Iterable[Callable[..., Any]]:
    """Return the hooks of all forwards, of both kinds; likewise."""
    return (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())


def is_compiled(module: nn.Module) -> bool:
    """Tell whether this is what torch.compile returns; to import its class takes long."""
    return type(module).__name__ == "OptimizedModule"


def is_compiled_in_place(module: nn.Module) -> bool:
    """Tell whether Module.compile was called; nothing public tells."""
    return getattr(module, "_compiled_call_impl", None) is not None


def forget_compiled(module: nn.Module) -> None:
    """Let a module be as before Module.compile was called."""
    module._compiled_call_impl = None


def reset_of(module: nn.Module) -> Any:
    """Return what draws a module's own parameters anew, or None.

    Most call it reset_parameters, MultiheadAttention and Transformer by a private name.
    """
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def copy_metadata(state: Any, of: Mapping[str, Any]) -> None:
    """Give a state dict the versions of modules that another has.

    By these load_state_dict knows what to convert; they are an attribute of the dict.
    """
    state._metadata = of._metadata  # type: ignore[attr-defined]


def load_hooks_of(
    optimizer: Optimizer,
) -> tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]]:
    """Return hooks of before and after load_state_dict, for a class with one of its own.

    There are functions that add and remove them, none that calls them.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks.values()
    return before, optimizer._optimizer_load_state_dict_post_hooks.values()
