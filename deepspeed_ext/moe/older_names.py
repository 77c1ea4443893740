"""State dicts with DeepSpeed's names, in which each expert has tensors of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor, part_for, spread

_GATE = "deepspeed_moe.gate.wg.weight"
_EXPERTS = "deepspeed_moe.experts.deepspeed_experts."


def take_older_names(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Put tensors with DeepSpeed's names under those of a MoE, and parts of whole ones.

    A hook of load_state_dict; torch then reports what is missing, and what is left.
    """
    if f"{prefix}{_GATE}" in state:
        state[f"{prefix}gate.weight"] = state.pop(f"{prefix}{_GATE}")
    experts: nn.Module = module.get_submodule("experts")
    here = {**dict(experts.named_parameters()), **dict(experts.named_buffers())}
    for name, stack in here.items():
        ours = f"{prefix}experts.{name}"
        theirs = [f"{prefix}{_EXPERTS}{i}.{name}" for i in range(len(stack))]
        found = {key: state.pop(key) for key in theirs if key in state}
        problem = _problem_of(theirs, found)
        if problem is not None:
            errors.append(problem)
        elif found:
            state[ours] = torch.stack(list(found.values()))
        value = state.get(ours)
        if is_dtensor(stack) and isinstance(value, Tensor) and not is_dtensor(value):
            state[ours] = spread(part_for(value, stack), stack)


def _problem_of(names: list[str], found: dict[str, Tensor]) -> str | None:
    """Say why tensors of experts cannot be stacked, or nothing: they can, or there are none."""
    if not found:
        return None
    lacking = [name for name in names if name not in found]
    if lacking:
        return f"MoE: {lacking[0]} is missing, expected one for each of {len(names)} experts"
    first = found[names[0]]
    for name, tensor in found.items():
        if tensor.shape != first.shape:
            return (
                f"MoE: {name} has shape {list(tensor.shape)}, expected {list(first.shape)}, as"
                " those of other experts"
            )
    return None
