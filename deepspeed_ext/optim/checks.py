"""What the optimizers refuse, and in which words: class, number of the parameter, fix."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.ops.mesh_sums import is_dtensor
from deepspeed_ext.ops.state_formats import blocks_of
from deepspeed_ext.optim.formats import MASTER, REMAINDER, SCALE
from deepspeed_ext.optim.sharding import is_cut_in_rows, is_partial, local
from deepspeed_ext.optim.slabs import STEP, Work, is_dense

if TYPE_CHECKING:
    from deepspeed_ext.optim.base import SlabOptimizer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_value(optimizer: "SlabOptimizer", name: str, value: object, ok: Any, want: str) -> None:
    """Raise ValueError if an option is not what it must be."""
    if not ok:
        raise ValueError(f"{type(optimizer).__name__}: {name} is {value}, expected {want}")


def check_no_capture(optimizer: "SlabOptimizer", device: torch.device, want: str) -> None:
    """Raise RuntimeError if memory that must outlive a CUDA graph would be allocated in one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        title = type(optimizer).__name__
        raise RuntimeError(f"{title}: a CUDA graph is being captured, expected at least one {want}")


_NUMBERS = frozenset({
    "lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "eeta", "epsilon",
    "initial_accumulator_value", "min_coeff", "max_coeff",
})  # fmt: skip


def check_numbers(optimizer: "SlabOptimizer", group: dict[str, Any]) -> None:
    """Raise TypeError if an option that has to be a number is something else."""
    for name in sorted(_NUMBERS & group.keys()):
        if not isinstance(group[name], (int, float, Tensor)):
            raise TypeError(
                f"{type(optimizer).__name__}: {name} is {group[name]!r}, expected a number"
            )


def check_betas(optimizer: "SlabOptimizer", group: dict[str, Any]) -> None:
    """Make `betas` two numbers, or raise ValueError."""
    try:
        group["betas"] = tuple(map(float, group["betas"]))
    except (TypeError, ValueError):
        check_value(optimizer, "betas", repr(group["betas"]), False, "two numbers")
    check_value(optimizer, "betas", group["betas"], len(group["betas"]) == 2, "two numbers")
    for i, beta in enumerate(group["betas"]):
        check_value(optimizer, f"betas[{i}]", beta, 0 <= beta < 1, "at least 0 and below 1")


def check_param(optimizer: "SlabOptimizer", param: Tensor, *, or_meta: bool = False) -> None:
    """Raise TypeError or ValueError if the optimizer cannot update this parameter.

    Args:
        optimizer: names itself and its parameters in the text.
        param: the tensor in question.
        or_meta: also accept one that has no memory yet, be it on meta or of a lazy module.
    """
    reason = _why_not(optimizer, param, or_meta)
    if reason:
        kind = TypeError if _is_wrapper(local(param)) else ValueError
        raise kind(f"{type(optimizer).__name__}: {_name(optimizer, param)} {reason}")


def _why_not(optimizer: "SlabOptimizer", param: Tensor, or_meta: bool) -> str | None:
    if is_dtensor(param):
        if is_partial(param):
            return f"is a DTensor with placements {param.placements}, expected Shard or Replicate"
        if optimizer.state_format.rounds_at_random and not is_cut_in_rows(param):
            return (
                f"is a DTensor with placements {param.placements}, expected Shard(0) or Replicate "
                f"with state_dtype={optimizer.state_format.state_dtype}"
            )
        reason = _why_not(optimizer, local(param), or_meta)
        return reason and f"is a DTensor whose local part {reason}"
    device = param.device.type
    if _is_wrapper(param):
        return (
            f"is a {type(param).__name__}, expected a plain tensor or a DTensor; "
            "use torch.optim.AdamW for it"
        )
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
    """Return whether this is a tensor in name only, whose memory belongs to other tensors."""
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
    masters = [key for key in (MASTER, REMAINDER) if key in entry and key not in dtypes]
    for key in (STEP, *dtypes, *masters):
        value = entry.get(key)
        shape = torch.Size() if key == STEP else param.shape
        if value is None:
            if key not in optimizer._optional_state:
                raise ValueError(f"{title} has keys {sorted(entry)}, expected {key} among them")
        elif not isinstance(value, Tensor):
            if key != STEP or not isinstance(value, (int, float)):
                raise ValueError(f"{title}: {key} is {value!r}, expected a tensor")
        elif value.shape != shape and not (key == STEP and value.numel() == 1):
            raise ValueError(
                f"{title}: {key} has shape {list(value.shape)}, expected {list(shape)}"
            )
        elif value.dtype == torch.uint8:
            scales, want = entry.get(key + SCALE), blocks_of(local(value).numel())
            got = list(scales.shape) if isinstance(scales, Tensor) else None
            if got != [want]:
                raise ValueError(f"{title}: {key + SCALE} has shape {got}, expected [{want}]")


def explain(optimizer: "SlabOptimizer", work: Work, error: Exception) -> None:
    """Raise a clearer error if a parameter or gradient explains why the op refused the call."""
    for owner, param, grad in zip(work.owners, work.params, work.grads, strict=True):
        check_param(optimizer, owner)
        reason = None
        if _is_wrapper(grad):
            reason = f"is a {type(grad).__name__}, expected a plain tensor, as its parameter is"
        elif grad.layout not in optimizer._grad_layouts:
            reason = "is sparse, expected dense; use torch.optim.SparseAdam for it"
        elif grad.dtype not in _DTYPES:
            reason = f"is {grad.dtype}, expected float32, bfloat16 or float16"
        elif grad.shape != param.shape:
            reason = f"has shape {list(grad.shape)}, expected {list(param.shape)}"
        if reason:
            raise ValueError(f"{_title_of_grad(optimizer, owner)} {reason}") from error


def check_shards(optimizer: "SlabOptimizer", work: Work) -> None:
    """Raise ValueError unless the gradients of DTensors are DTensors on the same mesh.

    Other placements are no error: torch's optimizers, too, redistribute such a gradient.
    """
    for param, grad in zip(work.owners, work.grads, strict=True):
        reason = None
        if not is_dtensor(grad):
            reason = f"is a {type(grad).__name__}, expected a DTensor, as its parameter is"
        elif is_dtensor(param) and grad.device_mesh != param.device_mesh:
            reason = f"is on {grad.device_mesh}, expected {param.device_mesh}"
        if reason:
            raise ValueError(f"{_title_of_grad(optimizer, param)} {reason}")


def _title_of_grad(optimizer: "SlabOptimizer", param: Tensor) -> str:
    return f"{type(optimizer).__name__}: gradient of {_name(optimizer, param)}"


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
