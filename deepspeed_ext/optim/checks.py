"""What the optimizers refuse, and in which words: class, number of the parameter, fix."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.optim.slabs import STEP, Work, is_dense

if TYPE_CHECKING:
    from deepspeed_ext.optim.base import SlabOptimizer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_value(optimizer: "SlabOptimizer", name: str, value: object, ok: Any, want: str) -> None:
    """Raise ValueError if an option is not what it must be."""
    if not ok:
        raise ValueError(f"{type(optimizer).__name__}: {name} is {value}, expected {want}")


def check_param(optimizer: "SlabOptimizer", param: Tensor, *, or_meta: bool = False) -> None:
    """Raise TypeError or ValueError if the optimizer cannot update this parameter.

    Args:
        optimizer: names itself and its parameters in the text.
        param: the tensor in question.
        or_meta: also accept one that has no memory yet, be it on meta or of a lazy module.
    """
    reason = _why_not(optimizer, param, or_meta)
    if reason:
        kind = TypeError if _is_wrapper(param) else ValueError
        raise kind(f"{type(optimizer).__name__}: {_name(optimizer, param)} {reason}")


def _why_not(optimizer: "SlabOptimizer", param: Tensor, or_meta: bool) -> str | None:
    device = param.device.type
    if _is_wrapper(param):
        return f"is a {type(param).__name__}, expected a plain tensor; use torch.optim.AdamW for it"
    if param.dtype not in _DTYPES:
        takes_it = param.is_floating_point() or param.is_complex()
        hint = "; use torch.optim.AdamW for it" if takes_it else ""
        return f"is {param.dtype}, expected float32, bfloat16 or float16{hint}"
    if or_meta and (device == "meta" or is_lazy(param)):
        return None
    if device not in optimizer._devices:
        hint = ""
        if device in optimizer._elsewhere:
            hint = f"; use {optimizer._elsewhere[device]} for {device.upper()} parameters"
        if device == "meta":
            hint = "; give it memory before the first step"
        return f"is on {param.device}, expected {' or '.join(optimizer._devices)}{hint}"
    if not is_dense(param):
        return (
            f"has shape {list(param.shape)} and strides {list(param.stride())}, "
            "expected no gaps or overlaps; use param.contiguous()"
        )
    return None


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether this is a DTensor or the like, whose memory belongs to other tensors."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_once(optimizer: "SlabOptimizer", params: Sequence[Tensor]) -> None:
    """Raise ValueError if a parameter is in the list twice: it would be updated twice."""
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            title = f"{type(optimizer).__name__}: {_name(optimizer, param)}"
            raise ValueError(f"{title} is in its group twice, expected once")
        seen.add(id(param))


def check_state(
    optimizer: "SlabOptimizer",
    param: Tensor,
    entry: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Raise ValueError unless the state of a parameter is complete and of its shape."""
    title = f"{type(optimizer).__name__}: state of {_name(optimizer, param)}"
    for key in (STEP, *dtypes):
        value = entry.get(key)
        shape = torch.Size() if key == STEP else param.shape
        if value is None:
            if key not in optimizer._optional_state:
                raise ValueError(f"{title} has keys {sorted(entry)}, expected {key} among them")
        elif not isinstance(value, Tensor):
            if key != STEP:
                raise ValueError(f"{title}: {key} is {value!r}, expected a tensor")
        elif value.shape != shape and not (key == STEP and value.numel() == 1):
            raise ValueError(
                f"{title}: {key} has shape {list(value.shape)}, expected {list(shape)}"
            )


def explain(optimizer: "SlabOptimizer", work: Work, error: Exception) -> None:
    """Raise a clearer error if a parameter or gradient explains why the op refused the call."""
    for param, grad in zip(work.params, work.grads, strict=True):
        check_param(optimizer, param)
        reason = None
        if grad.layout is not torch.strided:
            reason = "is sparse, expected dense; use torch.optim.SparseAdam for it"
        elif grad.dtype not in _DTYPES:
            reason = f"is {grad.dtype}, expected float32, bfloat16 or float16"
        elif grad.shape != param.shape:
            reason = f"has shape {list(grad.shape)}, expected {list(param.shape)}"
        if reason:
            title = f"{type(optimizer).__name__}: gradient of {_name(optimizer, param)}"
            raise ValueError(f"{title} {reason}") from error


def _name(optimizer: "SlabOptimizer", param: Tensor) -> str:
    """Return how errors call a parameter: its number, as in a state dict, and its name if known."""
    groups = optimizer.param_groups
    names = chain.from_iterable(
        group.get("param_names") or [None] * len(group["params"]) for group in groups
    )
    params = chain.from_iterable(group["params"] for group in groups)
    for i, (name, candidate) in enumerate(zip(names, params, strict=True)):
        if candidate is param:
            return f"params[{i}]" + (f" ({name})" if name else "")
    return "a parameter"
