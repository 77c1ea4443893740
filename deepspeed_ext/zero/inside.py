"""What is known of the insides of fully_shard in torch 2.11 and 2.13; nothing else knows any."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def groups_of(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters of a model that are gathered and reduced as one."""
    for state in _states(model):
        if hasattr(state, "_fsdp_param_groups"):  # torch 2.13; 2.11 has at most one
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def forget_step(model: nn.Module) -> None:
    """Bring a model back to before a forward: shards, no gradients, also after an error."""
    root: Any = model
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_2_11(model)
    for group in groups_of(model):
        group._partial_reduce_output = None  # of HSDP
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        group.reshard()
    for param in model.parameters():
        param.grad = None


def was_interrupted(model: nn.Module) -> bool:
    """Tell, before a forward, whether an error has ended the one before it or its backward."""
    state = next(_states(model))
    context = state._state_ctx
    is_open = context.iter_forward_root is not None
    return is_open or bool(context.post_backward_final_callback_queued)


def is_in_backward() -> bool:
    """Tell whether a forward is run anew for a backward that wants what it had not kept."""
    return torch._C._current_graph_task_id() != -1


def _states(model: nn.Module) -> Iterator[Any]:
    return (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))


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
