"""How a model is taken apart: what rests in host memory, and what stays on the device."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.offload.host_tensors import Memory, host_memory
from deepspeed_ext.processors import share_here
from deepspeed_ext.torch_internals.modules import buffers_of
from deepspeed_ext.zero.memory import note_empty, put

OP = "zero.stream"
# Parameters with fewer elements than this part of their block's largest one stay on the device:
# norms, biases, routers, adapters. To bring them would cost calls, and save next to nothing.
_SMALL = 64
_META = torch.device("meta")


def streamed_parameters(model: nn.Module, blocks: dict[str, nn.Module]) -> list[list[nn.Parameter]]:
    """Return for each block the parameters that rest in host memory, each only once.

    Raises:
        ValueError: a parameter is on meta, sharded or has no shape yet; or blocks lie in others.
    """
    _check(model, blocks)
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    outside = {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
    seen = set(outside)
    found = []
    for block in blocks.values():
        found.append([param for param in large_ones(block.parameters()) if id(param) not in seen])
        seen.update(map(id, found[-1]))
    return found


def large_ones(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of a block's parameters that are not small beside its largest one."""
    known = list(params)
    largest = max((param.numel() for param in known), default=0)
    return [param for param in known if param.numel() * _SMALL >= largest > 0]


def _check(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{OP}: model has {name or 'itself'!r}, which torch.jit.script returned, expected"
                " modules of Python"
            )
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise ValueError(
                f"{OP}: parameter {name!r} is sharded, expected a whole one; several processes"
                ' keep theirs in host memory by zero.shard(model, 3, offload="cpu")'
            )
        if is_lazy(param):
            raise ValueError(
                f"{OP}: parameter {name!r} has no shape yet, expected one; run the model once"
            )
        if param.is_inference():
            raise ValueError(
                f"{OP}: parameter {name!r} was made in torch.inference_mode(), expected one that"
                " can be written; make the model outside of it"
            )
    for outer, block in blocks.items():
        for name, module in block.named_modules():
            if module is not block and any(module is other for other in blocks.values()):
                raise ValueError(
                    f"{OP}: blocks has {outer!r} and {f'{outer}.{name}'!r} in it, expected blocks"
                    " beside each other"
                )


def pinned_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return pinned host memory in the shape, dtype and layout of each of these, in one piece."""
    return host_memory(tensors, share_here())


@torch.no_grad()
def bring_to_rest(params: list[nn.Parameter], memory_for: Memory) -> None:
    """Give parameters memory to rest in, with all that they are."""
    if not params:
        return
    parts = [param.detach() for param in params]
    for param, part, memory in zip(params, parts, memory_for(parts), strict=True):
        if param.is_meta:
            put(param, memory)
            note_empty(param)
            continue
        param.data = memory.copy_(part)
        if param.grad is not None:
            param.grad = param.grad.to("cpu")


@torch.no_grad()
def bring_to_device(model: nn.Module, device: torch.device, resting: Iterable[Tensor]) -> None:
    """Bring all other parameters, and the buffers, to the device."""
    rests = set(map(id, resting))
    for param in model.parameters():
        if id(param) not in rests and param.device not in (device, _META):
            grad = None if param.grad is None else param.grad.to(device)
            param.grad = None
            param.data = param.data.to(device)
            param.grad = grad
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.device not in (device, _META):
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                buffers_of(module)[name] = moved[id(buffer)]
