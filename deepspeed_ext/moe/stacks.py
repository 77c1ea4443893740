"""Stacks: parameters of many experts in one, and their slices, with gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_ext.torch_internals.modules import (
    buffers_of,
    modules_of,
    non_persistent_of,
    parameters_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def copied(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a deep copy, with other tensors for its parameters and buffers.

    Args:
        module: to copy.
        make: returns the tensor for one of its own; what is tied stays tied.
    """
    made: dict[int, Any] = {}
    for param in module.parameters():
        made[id(param)] = nn.Parameter(make(param), param.requires_grad)
    for buffer in module.buffers():
        made[id(buffer)] = make(buffer)
    return copy.deepcopy(module, made)


def stacked(tensor: Tensor, count: int, mesh: "DeviceMesh | None") -> Tensor:
    """Return as many copies in one, a parameter if it is one."""
    stack = (
        tensor.detach().expand(count, *tensor.shape).clone(memory_format=torch.contiguous_format)
    )
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Shard

        stack = DTensor.from_local(stack, mesh, [Shard(0)], run_check=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stack, tensor.requires_grad)
    return stack


def mirror(
    module: nn.Module, into: nn.Module, stacks: dict[int, Any], made: dict[int, nn.Module]
) -> None:
    """Give a module children, parameters and buffers as another one has, but stacked."""
    made[id(module)] = into
    try:
        for name, param in parameters_of(module).items():
            into.register_parameter(name, None if param is None else stacks[id(param)])
        for name, buffer in buffers_of(module).items():
            stack = None if buffer is None else stacks[id(buffer)]
            into.register_buffer(name, stack, name not in non_persistent_of(module))
        for name, child in modules_of(module).items():
            if child is None or id(child) in made:
                into.register_module(name, None if child is None else made[id(child)])
            else:
                into.register_module(name, nn.Module())
                mirror(child, into.get_submodule(name), stacks, made)
    except KeyError as error:
        raise ValueError(f"Experts: {type(module).__name__} has a {error.args[0]}") from None


def of_all(weight: Tensor, processes: int) -> Tensor:
    """Return a weight that rows of all processes go through: its gradient is divided by them."""
    found: Tensor = _OfAll.apply(weight, processes)  # type: ignore[no-untyped-call]
    return found if weight.requires_grad else weight


def slices(stacks: Sequence[Tensor], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return what ties all stacks to a result, and all slices, those of one stack together.

    Args:
        stacks: as long as each other.
        like: a tensor on their device.
    """
    zero, *found = _Slices.apply(like.new_zeros(()), *stacks)  # type: ignore[no-untyped-call]
    return zero, found


def tied(result: Tensor, tie: Tensor) -> Tensor:
    """Return a result of which all stacks of a tie get gradients, if it has one."""
    found: Tensor = _Tied.apply(result, tie)  # type: ignore[no-untyped-call]
    return found


class _OfAll(torch.autograd.Function):
    """A weight that all processes of a mesh use: their losses count as their mean."""

    @staticmethod
    def forward(weight: Tensor, processes: int) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.processes = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.processes, None


class _Slices(torch.autograd.Function):
    """All slices of all stacks, and a 0: whichever is used, all stacks have gradients."""

    @staticmethod
    def forward(zero: Tensor, *stacks: Tensor) -> tuple[Tensor, ...]:
        return zero.clone(), *(piece for stack in stacks for piece in stack.unbind())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.likes = [stack[0].detach() for stack in inputs[1:]]
        ctx.count = len(inputs[1]) if len(inputs) > 1 else 0

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        for i, like in enumerate(ctx.likes):
            own = grads[i * ctx.count : (i + 1) * ctx.count]
            if ctx.needs_input_grad[1 + i]:
                zero = torch.zeros_like(like) if any(grad is None for grad in own) else None
                pieces = [zero if grad is None else grad for grad in own]
                found.append(torch.stack(pieces))  # type: ignore[arg-type]
            else:
                found.append(None)
        return tuple(found)


class _Tied(torch.autograd.Function):
    """A result that is made of a 0 as well, and not changed by it."""

    @staticmethod
    def forward(result: Tensor, zero: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return grad, None if grad is None else torch.zeros((), device=grad.device)
