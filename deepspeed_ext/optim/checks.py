"""What the optimizers refuse, and in which words: class, number of the parameter, fix."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import is_cut_in_rows, is_dtensor, is_partial, local
from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops.optimizers.clip import renamed
from deepspeed_ext.ops.optimizers.state_formats import blocks_of, is_dense
from deepspeed_ext.ops.optimizers.step_op import Flag, Number
from deepspeed_ext.optim.buckets import STEP, BucketView
from deepspeed_ext.optim.foreign_state import refused_key
from deepspeed_ext.optim.formats import MASTER, REMAINDER, SCALE, FormatOptions
from deepspeed_ext.optim.owner import Owner

_DECOUPLED = "decoupled_weight_decay"
COUNT = "a finite number, at least 0"  # what errors say that steps must be


def check_value(optimizer: Owner, name: str, value: object, ok: Any, want: str) -> None:
    """Raise ValueError if an option is not what it must be."""
    if not ok:
        raise ValueError(f"{type(optimizer).__name__}: {name} is {value}, expected {want}")


def check_no_capture(optimizer: Owner, device: torch.device, want: str) -> None:
    """Raise RuntimeError if memory that must outlive a CUDA graph would be allocated in one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        title = type(optimizer).__name__
        raise RuntimeError(f"{title}: a CUDA graph is being captured, expected at least one {want}")


def check_flags(optimizer: Owner, options: Mapping[str, Any]) -> None:
    """Raise TypeError if an option that is on or off is something else: any text would be on."""
    for name, value in options.items():
        if not (isinstance(value, int) and value in (0, 1)):  # a bool is an int
            raise TypeError(f"{type(optimizer).__name__}: {name} is {value!r}, expected a bool")


def check_group_keys(optimizer: torch.optim.Optimizer, group: Iterable[str]) -> None:
    """Raise TypeError if a group has an argument of the constructor that is no option of groups.

    It would be ignored. What no constructor here knows is the user's own, as in torch.
    """
    name = type(optimizer).__name__
    arguments = _arguments_of(type(optimizer))
    for key in group:
        if key in arguments and key not in optimizer.defaults:
            is_mode = key in ("adam_w_mode", "adamw_mode") and _DECOUPLED in optimizer.defaults
            instead = f"; give the group {_DECOUPLED}" if is_mode else ""
            raise TypeError(
                f"{name}: param_group has {key}, expected it as an argument of {name}, as it is for"
                f" all groups{instead}"
            )


def _arguments_of(kind: type) -> set[str]:
    """Return the names of what constructors of ours take, one of the user's above them or not."""
    found = {"adam_w_mode", "adamw_mode", *FormatOptions.__optional_keys__}
    for each in kind.__mro__:
        if "__init__" in vars(each) and each.__module__.startswith("deepspeed_ext."):
            named = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
            found |= {p.name for p in named if p.kind is not p.VAR_KEYWORD}
    return found - {"self", "params", "defaults"}


def check_options(optimizer: Owner, group: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if an option of a group is not what the table of it says.

    A pair becomes a tuple of floats.
    """
    options = optimizer.spec.all_options
    numbers = [option for option in options if isinstance(option, Number)]
    single = [number for number in numbers if not number.is_pair]
    for number in single:
        value = group[number.key]
        if not isinstance(value, (int, float, Tensor)):
            title = f"{type(optimizer).__name__}: {number.key}"
            raise TypeError(f"{title} is {value!r}, expected a number")
    check_flags(optimizer, {o.key: group[o.key] for o in options if isinstance(o, Flag)})
    lr = group["lr"]
    if isinstance(lr, Tensor):
        title = f"a tensor of {lr.numel()} elements"
        check_value(optimizer, "lr", title, lr.numel() == 1, "one")
    for number in single:
        value = group[number.key]
        check_value(optimizer, number.key, value, number.takes(value), number.want)
    for number in numbers:
        if number.is_pair:
            group[number.key] = _checked_pair(optimizer, number, group[number.key])


def _checked_pair(optimizer: Owner, number: Number, values: Sequence[Any]) -> tuple[float, ...]:
    name = number.key
    try:
        pair = tuple(map(float, values))
    except (TypeError, ValueError):
        check_value(optimizer, name, repr(values), False, "two numbers")
    check_value(optimizer, name, pair, len(pair) == 2, "two numbers")
    for i, value in enumerate(pair):
        check_value(optimizer, f"{name}[{i}]", value, number.takes(value), number.want)
    return pair


def check_param(optimizer: Owner, param: Tensor, *, or_meta: bool = False) -> None:
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


def _why_not(optimizer: Owner, param: Tensor, or_meta: bool) -> str | None:
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
    if param.layout is not torch.strided:  # which has no strides to ask for
        return f"is sparse, {param.layout}, expected dense; use param.to_dense()"
    if param.dtype not in DTYPES:
        takes_it = param.is_floating_point() or param.is_complex()
        hint = "; use torch.optim.AdamW for it" if takes_it else ""
        return f"is {param.dtype}, expected float32, bfloat16 or float16{hint}"
    if or_meta and (device == "meta" or is_lazy(param)):
        return None
    if param.is_inference() and MASTER in optimizer.state_format.dtypes((), param.dtype):
        return (
            "is an inference tensor, expected one that counts how often it is written, for its "
            "master; make it outside of torch.inference_mode()"
        )
    if device not in optimizer.spec.devices:
        hint = ""
        if device in optimizer.spec.elsewhere:
            hint = f"; use {optimizer.spec.elsewhere[device]} for {device.upper()} parameters"
        if device == "meta":
            hint = "; give it memory before the first step"
        return f"is on {param.device}, expected {' or '.join(optimizer.spec.devices)}{hint}"
    if not is_dense(param):
        return (
            f"has shape {list(param.shape)} and strides {list(param.stride())}, "
            "expected no gaps or overlaps; use param.contiguous()"
        )
    return None


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether this is a tensor in name only, whose memory belongs to other tensors."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_once(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Raise ValueError if a parameter is in the list twice: it would be updated twice."""
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            title = f"{type(optimizer).__name__}: {_name(optimizer, param)}"
            raise ValueError(f"{title} is in its group twice, expected once")
        seen.add(id(param))


def check_state(
    optimizer: Owner,
    param: Tensor,
    entry: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    *,
    or_meta: bool = False,
) -> None:
    """Raise ValueError unless the state of a parameter is complete and of its shape.

    Args:
        optimizer: names itself and its parameters in the text.
        param: of which it is the state.
        entry: the state.
        dtypes: of what this optimizer keeps for it.
        or_meta: also accept tensors without memory, of which only shape and dtype are known.
    """
    other_masters = [key for key in (MASTER, REMAINDER) if key in entry and key not in dtypes]
    for key in (STEP, *dtypes, *other_masters):
        value = entry.get(key)
        if value is None:
            if not optimizer.spec.may_lack(key):
                title = title_of_state(optimizer, param)
                raise ValueError(f"{title} has keys {sorted(entry)}, expected {key} among them")
            continue
        reason = _wrong_with(key, value, torch.Size() if key == STEP else param.shape, or_meta)
        if reason is None and isinstance(value, Tensor) and value.dtype == torch.uint8:
            key, reason = key + SCALE, _wrong_with_scales(entry.get(key + SCALE), value, or_meta)
        if reason:
            raise ValueError(f"{title_of_state(optimizer, param)}: {key} {reason}")


def check_kind(optimizer: Owner, param: Tensor, entry: Mapping[str, Any]) -> None:
    """Raise ValueError if state that is given to an optimizer is of another class."""
    states = optimizer.spec.op.states
    known = [state.key for state in states]
    is_any = any(entry.get(key) is not None for key in known)
    needed = [state.key for state in states if state.when is None and is_any]
    reason = refused_key(entry, needed, known)
    if reason:
        raise ValueError(f"{title_of_state(optimizer, param)} {reason}")


def check_entry(optimizer: Owner, param: Tensor, entry: object) -> None:
    """Raise ValueError unless the state of a parameter is a dict, as all state is."""
    if not isinstance(entry, dict):
        title = title_of_state(optimizer, param)
        raise ValueError(f"{title} is a {type(entry).__name__}, expected a dict")


def _wrong_with(key: str, value: object, shape: torch.Size, or_meta: bool) -> str | None:
    """Return why this can be no state of a parameter of this shape; its numbers are not looked at.

    Those of tensors are on the device; see `StateValidation`.
    """
    if not isinstance(value, Tensor):
        if key != STEP or not isinstance(value, (int, float)):
            return f"is {value!r}, expected a tensor"
        return None if 0 <= value < 2**128 else f"is {value}, expected {COUNT}"
    if value.shape != shape and not (key == STEP and value.numel() == 1):
        return f"has shape {list(value.shape)}, expected {list(shape)}"
    if key == STEP:
        fits, want = not value.is_complex(), "a real number"
    elif key == REMAINDER:
        fits, want = value.dtype in (torch.int16, torch.int32), "int16"
    else:
        fits = value.is_floating_point() or (value.dtype == torch.uint8 and key != MASTER)
        want = "a floating dtype"
    wrong = None if fits else f"is {value.dtype}, expected {want}"
    return _without_memory(value, or_meta) or wrong


def _without_memory(value: Tensor, or_meta: bool) -> str | None:
    """Return why the elements of a tensor cannot be copied."""
    part = local(value)
    if part.layout is not torch.strided:
        return "is sparse, expected dense"
    if part.is_meta:
        return None if or_meta else "is on meta, expected a device with memory"
    if part.numel() and not part.data_ptr():
        return f"has no memory, expected {part.numel()} elements"
    return None


def _wrong_with_scales(scales: object, codes: Tensor, or_meta: bool) -> str | None:
    """Return why these can be no scales of 8-bit codes."""
    want = blocks_of(local(codes).numel())
    got = list(scales.shape) if isinstance(scales, Tensor) else None
    if not isinstance(scales, Tensor) or got != [want]:
        return f"has shape {got}, expected [{want}]"
    ok = scales.is_floating_point()
    return _without_memory(scales, or_meta) or (
        None if ok else f"is {scales.dtype}, expected float32"
    )


def explain(optimizer: Owner, view: BucketView, error: Exception) -> None:
    """Raise a clearer error if a parameter or gradient explains why the op refused the call.

    Not if only dtypes differ from one to the other: then the call can be made in parts.
    """
    for owner, param, grad in zip(view.owners, view.params, view.grads, strict=True):
        check_param(optimizer, owner)
        reason = None
        if _is_wrapper(grad):
            reason = f"is a {type(grad).__name__}, expected a plain tensor, as its parameter is"
        elif grad.layout not in optimizer.spec.grad_layouts:
            reason = "is sparse, expected dense; use torch.optim.SparseAdam for it"
        elif grad.dtype not in DTYPES:
            reason = f"is {grad.dtype}, expected float32, bfloat16 or float16"
        elif grad.shape != param.shape:
            reason = f"has shape {list(grad.shape)}, expected {list(param.shape)}"
        if reason:
            raise ValueError(f"{_title_of_grad(optimizer, owner)} {reason}") from error


def name_refused(optimizer: Owner, view: BucketView, error: Exception) -> None:
    """Raise the error of an op again, if it tells of tensors, with the names that users know.

    An op counts the tensors of a call, and calls them params, grads or tensors.
    """

    def name_of(kind: str, i: int) -> str:
        if i >= len(view.owners):
            return f"{kind}[{i}]"
        name = _name(optimizer, view.owners[i])
        return name if kind == "params" else f"gradient of {name}"

    told = renamed(error, type(optimizer).__name__, name_of)
    if told is not error:
        raise told from error


def check_shards(optimizer: Owner, view: BucketView) -> None:
    """Raise ValueError unless the gradients of DTensors are DTensors on the same mesh.

    Other placements are no error: torch's optimizers, too, redistribute such a gradient.
    """
    for param, grad in zip(view.owners, view.grads, strict=True):
        reason = None
        if not is_dtensor(grad):
            reason = f"is a {type(grad).__name__}, expected a DTensor, as its parameter is"
        elif is_dtensor(param) and grad.device_mesh != param.device_mesh:
            reason = f"is on {grad.device_mesh}, expected {param.device_mesh}"
        if reason:
            raise ValueError(f"{_title_of_grad(optimizer, param)} {reason}")


def title_of_state(optimizer: Owner | torch.optim.Optimizer, param: Tensor) -> str:
    """Return how errors call the state of a parameter."""
    return f"{type(optimizer).__name__}: state of {_name(optimizer, param)}"


def _title_of_grad(optimizer: Owner, param: Tensor) -> str:
    return f"{type(optimizer).__name__}: gradient of {_name(optimizer, param)}"


def _name(optimizer: Owner | torch.optim.Optimizer, param: Tensor) -> str:
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
