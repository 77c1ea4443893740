"""What is known of the insides of fully_shard in torch 2.11 and 2.13; nothing else knows any."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from deepspeed_ext.torch_internals.dispatch import is_in_backward, tree_map
from deepspeed_ext.torch_internals.tensors import differ

_PARTS = "_deepspeed_ext_parts"
_autograd: Any = torch.autograd  # with what the type checker does not know
_SET: Any = nn.Module.__setattr__


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of parameters of a model that are gathered and reduced as one."""
    return _parts_of(model).groups


def shards_of(model: nn.Module) -> Iterator[Tensor]:
    """The sharded parameters of a model, also while whole ones stand in their places."""
    for group in groups_of(model):
        for param in group.fsdp_params:
            yield param.sharded_param


def forget_step(model: nn.Module) -> None:
    """Bring a model back to before a forward: shards, no gradients, also after an error."""
    settle(model)
    for group in groups_of(model):
        drop_partial_sum(group)
        for param in group.fsdp_params:
            drop_unreduced(param)
            param.sharded_param.grad = None


def settle(model: nn.Module) -> None:
    """Forget a forward or backward that an error has ended; gradients stay as they are."""
    kept = [(group, group._partial_reduce_output) for group in groups_of(model)]
    root: Any = model
    if _states(model)[0]._is_root is None:
        pass  # before the first forward there is nothing to forget
    elif hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_2_11(model)
    for group, partial_sum in kept:
        group._partial_reduce_output = partial_sum
        group.reshard()


def interruption(model: nn.Module) -> str:
    """Tell, while neither runs, whether an error has ended a "forward" or "backward", or none."""
    state = _states(model)[0]
    context = state._state_ctx
    if context.post_backward_final_callback_queued:
        return "backward"
    return "forward" if context.iter_forward_root is not None else ""


def is_settled(model: nn.Module) -> bool:
    """Tell, while neither runs, whether no block is still in a forward or backward.

    One is where its error was caught within the forward of the model.
    """
    states = (*_states(model), *groups_of(model))
    return all(state._training_state.name == "IDLE" for state in states)


def has_unreduced(model: nn.Module) -> bool:
    """Tell whether there are gradients that processes have not added up yet."""
    return any(
        has_partial_sum(group) or any(map(is_unreduced, group.fsdp_params))
        for group in groups_of(model)
    )


def has_partial_sum(group: Any) -> bool:
    """Tell whether replicas have gradients of a group that they have not added up yet (HSDP)."""
    return group._partial_reduce_output is not None


def drop_partial_sum(group: Any) -> None:
    """Drop that sum."""
    group._partial_reduce_output = None


def is_unreduced(param: Any) -> bool:
    """Tell whether a parameter has a gradient that its processes have not added up yet."""
    whole = whole_of(param)
    accumulated: Tensor | None = param.unsharded_accumulated_grad
    return accumulated is not None or (whole is not None and whole.grad is not None)


def drop_unreduced(param: Any) -> None:
    """Drop that gradient."""
    param.unsharded_accumulated_grad = None
    whole = whole_of(param)
    if whole is not None:
        whole.grad = None


def whole_of(param: Any) -> Tensor | None:
    """Return the whole parameter, which has values while it is gathered; None before the first."""
    whole: Tensor | None = getattr(param, "_unsharded_param", None)
    return whole


def after_backward(model: nn.Module, told: Callable[[], None]) -> None:
    """Have it told when a backward through any block of a model is over; not after an error."""
    for state in _states(model):
        over = partial(_end_backward, state._root_post_backward_final_callback, state, told)
        state._root_post_backward_final_callback = over


def before_reduction(model: nn.Module, told: Callable[[Any], None]) -> None:
    """Have it told of each group in a backward, before its gradients are added up or kept."""
    for group in groups_of(model):
        group.post_backward = partial(_post_backward, group.post_backward, group, told)


def show_shards(model: nn.Module) -> None:
    """Show shards where whole parameters are kept for a backward, which alone uses them then."""
    for group in groups_of(model):
        if group.is_unsharded:
            for param in group.fsdp_params:
                _show(param, param.sharded_param)


def show_kept(model: nn.Module) -> None:
    """Show whole parameters that are kept, for a forward that uses them; frozen as shards are."""
    for group in groups_of(model):
        if group.is_unsharded:
            _show_whole(group)


def written(model: nn.Module) -> Tensor | None:
    """Return whether a shard is not what it was when whole parameters that are kept were gathered.

    Bits are compared: no version counter tells of all writes. Nothing waits for the result. None:
    nothing is kept, or what is kept is a tensor that gathers in its own way.
    """
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for group in groups_of(model):
        for param in group.fsdp_params if group.is_unsharded else ():
            shard, wholes = param._sharded_param_data, param.all_gather_outputs
            if len(wholes) != 1:
                return None
            shards, parts = pairs.setdefault((shard.dtype, wholes[0].dtype), ([], []))
            shards.append(shard)
            parts.append(_part_of_whole(param, wholes[0], group.mesh_info.shard_mesh_rank))
    found = [differ(shards, parts) for shards, parts in pairs.values()]
    return torch.stack(found).any() if found else None


def _part_of_whole(param: Any, whole: Tensor, rank: int) -> Tensor:
    """Return what a process has of a gathered parameter, in one dimension as it is."""
    dimension = param.fsdp_placement.dim
    if dimension == 0:
        size = param._sharded_param_data.numel()
        return whole.narrow(0, rank * size, size)
    size = param.sharded_size[dimension]
    return whole.view(param._orig_size).narrow(dimension, rank * size, size).flatten()


def has_all_weights(model: nn.Module) -> bool:
    """Tell whether this process has all weights, so that nothing is gathered from others."""
    return all(group.mesh_info.shard_mesh_size == 1 for group in groups_of(model))


def gather_alone(model: nn.Module) -> bool:
    """Have whole parameters that are kept be what a process that has all of them would gather.

    A copy costs no more than to find out whether they still are, and nothing waits for it.

    Returns:
        whether there are any and all are; not tensors that gather in their own way.
    """
    kept = [p for group in groups_of(model) if group.is_unsharded for p in group.fsdp_params]
    if not kept or any(len(param.all_gather_outputs) != 1 for param in kept):
        return False
    wholes = [param.all_gather_outputs[0] for param in kept]
    with torch.no_grad(), _autograd._unsafe_preserve_version_counter(tuple(wholes)):
        torch._foreach_copy_(wholes, [param._sharded_param_data for param in kept])
    return True


def keep_for_backward(model: nn.Module, begins: Callable[[], None]) -> None:
    """Let a backward find what is kept where shards are shown, and a forward gather anew.

    Shards may be written to while they are shown, in whatever way.

    Args:
        model: that is sharded.
        begins: called in each backward, before it gathers anything, once or more often.
    """
    for group in groups_of(model):
        group.unshard = partial(_unshard, group.unshard, group, weakref.ref(model), begins)


def when_first_gathered(model: nn.Module, told: Callable[[Tensor, Tensor], None]) -> None:
    """Have it told the shard and the whole of each parameter, once: the whole stays the same one.

    Args:
        model: that is sharded.
        told: called when the whole one has got its memory.
    """
    for group in groups_of(model):
        group.wait_for_unshard = partial(_wait_once, group.wait_for_unshard, group, told)


def is_in_forward(model: nn.Module) -> bool:
    """Tell whether a forward of a model, or of a block that was called by itself, is under way."""
    return _states(model)[0]._state_ctx.iter_forward_root is not None


def allow_whole_loads(model: nn.Module) -> None:
    """Let load_state_dict fill whole parameters that stand in the places of shards.

    Torch takes what is there after a load for a shard.
    """
    for group in groups_of(model):
        for param in group.fsdp_params:
            param.reset_sharded_param = partial(_reset, param.reset_sharded_param, param)


def know_whole_parameters(model: nn.Module) -> None:
    """Gather each group once: parameters of one that never was have no gradient of 0 if unused.

    Nor can they be trained after that was in torch.inference_mode, to whose tensors nobody writes.
    """
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def know_dtypes(model: nn.Module) -> None:
    """Let a group know the dtype of its gradients when its first parameter is thawed.

    Torch asks before the first forward only.
    """
    for group in groups_of(model):
        if getattr(group, "_orig_dtype", group) is None:
            group._init_mp_dtypes()


def call_whole(model: nn.Module, shown: set[int], casts: bool) -> Callable[[], None]:
    """Let blocks run as if nothing were sharded while whole parameters stand in their modules.

    A call of a block of which some parameters are shown, and others not, is an error.

    Args:
        model: that is sharded.
        shown: ids of shards in whose places whole parameters stand.
        casts: inputs and outputs are cast as they are where shards are gathered.

    Returns:
        What ends it.
    """
    put: list[tuple[dict[int, Any], int, Any]] = []
    for state in _states(model):
        params = [param for group in _groups_of_state(state) for param in group.fsdp_params]
        are_shown = [id(param.sharded_param) in shown for param in params]
        if any(are_shown) or len(shown) == sum(1 for _ in shards_of(model)):
            policy = state._mp_policy if casts else None
            before = partial(_cast_inputs, policy) if all(are_shown) else _refuse_call
            after = partial(_cast_output, policy)
            handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
            for handle, stands_in in zip(handles, (before, after), strict=True):
                hooks = handle.hooks_dict_ref()
                put.append((hooks, handle.id, hooks[handle.id]))
                hooks[handle.id] = stands_in
    return partial(_put_back, put)


class _Parts(NamedTuple):
    states: list[Any]
    groups: list[Any]


def _parts_of(model: Any) -> _Parts:
    """Return what fully_shard has made, which is kept with the model as it goes with it."""
    own = model._get_fsdp_state()
    if not hasattr(own, _PARTS):
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [group for state in states for group in _groups_of_state(state)]
        setattr(own, _PARTS, _Parts(states, groups))
    parts: _Parts = getattr(own, _PARTS)
    return parts


def _groups_of_state(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13; 2.11 has at most one
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _cast_inputs(policy: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    dtype = None if policy is None or not policy.cast_forward_inputs else policy.param_dtype
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast_output(policy: Any, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(None if policy is None else policy.output_dtype, output)


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return values if dtype is None else tree_map(cast, values)


def _refuse_call(module: nn.Module, *_: Any) -> None:
    name = type(module).__name__.removeprefix("FSDP")
    raise RuntimeError(
        f"zero: a {name} is called inside of GatheredParameters of some of its parameters, expected"
        " all of them there, or none"
    )


def _put_back(put: list[tuple[dict[int, Any], int, Any]]) -> None:
    for hooks, key, hook in put:
        hooks[key] = hook


def _states(model: nn.Module) -> list[Any]:
    return _parts_of(model).states


def _unshard(
    unshard: Any,
    group: Any,
    of: "weakref.ref[nn.Module]",
    begins: Callable[[], None],
    async_op: bool = False,
) -> None:
    model = of()
    if is_in_backward():
        begins()
    if model is not None and _shows_kept(group):
        if is_in_backward():
            # All, as what is run anew may use those of a group whose own backward does not begin.
            for other in filter(_shows_kept, groups_of(model)):
                _show_whole(other)
        else:
            group._to_sharded()
    unshard(async_op)


def _wait_once(wait: Any, group: Any, told: Callable[[Tensor, Tensor], None]) -> None:
    wait()
    wholes = [(param.sharded_param, whole_of(param)) for param in group.fsdp_params]
    for shard, whole in wholes:
        if whole is not None:
            told(shard, whole)
    if all(whole is not None for _, whole in wholes):
        group.wait_for_unshard = wait


def _show_whole(group: Any) -> None:
    for param in group.fsdp_params:
        whole, is_trained = param._unsharded_param, param.sharded_param.requires_grad
        if whole.requires_grad != is_trained:
            whole.requires_grad_(is_trained)
        _show(param, whole)


def _show(param: Any, tensor: Tensor) -> None:
    """Put a tensor in the places of a parameter, in most models at a third of what torch takes."""
    home = param._module_info
    if home.shared_modules or type(home.module).__setattr__ is not _SET:
        param._setattr_on_modules(tensor)
    else:
        home.module._parameters[home.param_name] = tensor


def _post_backward(
    finish: Callable[..., None], group: Any, told: Callable[[Any], None], *unused: Any
) -> None:
    told(group)
    if any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params):
        # Torch expects one dtype, and has another where an earlier micro-step had no gradient.
        for param in group.fsdp_params:
            if param.unsharded_accumulated_grad is not None:
                continue
            if is_unreduced(param):
                param.to_accumulated_grad_if_needed()
            elif getattr(group, "reduce_scatter_unused_params", False) and group.reduce_grads:
                whole = whole_of(param)
                if whole is not None and whole.requires_grad:
                    zeros = torch.zeros_like(whole, dtype=param.reduce_dtype)
                    param.unsharded_accumulated_grad = zeros
    finish(*unused)


def _reset(reset: Any, param: Any) -> None:
    home = param._module_info
    if isinstance(home.module._parameters[home.param_name], DTensor):
        reset()


def _shows_kept(group: Any) -> bool:
    """Return whether a group is whole, and its modules have shards."""
    if not group.is_unsharded or not group.fsdp_params:
        return False
    param = group.fsdp_params[0]
    home = param._module_info
    return home.module._parameters.get(home.param_name) is param.sharded_param


def _end_backward(finish: Callable[[], None], state: Any, told: Callable[[], None]) -> None:
    finish()
    # A forward run anew may end before its last block does, and 2.11 waits for that ever after.
    state._state_ctx.iter_forward_root = None
    told()


def _reset_2_11(model: nn.Module) -> None:
    """Do what reset_iter_state does, which came later."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # for what was under way; after an error only
    for state in _states(model):
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        context = state._comm_ctx
        context.all_gather_state = context.reduce_scatter_state = None
        context.post_forward_order = []
    for group in groups_of(model):
        group._training_state = TrainingState.IDLE
        group._all_gather_result = group._post_reduce_event = None
        group._all_reduce_state = group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
