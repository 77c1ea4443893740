"""Clip gradients by their global norm, over all devices and processes that hold parts of them."""

import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local, sum_over_shards
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms, sum_in_order


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their L2 norm together is at most max_norm.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, with the norm and the factor worked out in
    float64, also of 16-bit gradients (on CUDA, torch rounds the factor to their dtype; the
    optimizers' `clip_and_step` does not). Gradients that are DTensors count whole, not only the
    shard of this process, and every process calls it. Nothing waits for the device, unless
    error_if_nonfinite asks for it or some gradients are on the CPU and some are not.

    Args:
        parameters: a tensor or several, on any devices; those without a gradient are left out.
            Gradients are float32, bfloat16 or float16. They are modified.
        max_norm: the largest norm to leave as it is, at least 0; a number.
        error_if_nonfinite: raise if a gradient has inf or NaN, before anything is modified.
            Otherwise all gradients become NaN or 0, as in torch.

    Returns:
        The norm before clipping: float32, no dimension, on the device of the first gradient. inf or
        NaN if and only if a gradient has that: a norm beyond float32 is its largest number.

    Raises:
        TypeError: max_norm is no number.
        ValueError: max_norm is negative or NaN, or a gradient is of a wrong kind, such as a Partial
            DTensor; nothing is modified.
        RuntimeError: a gradient has inf or NaN, with error_if_nonfinite.

    See: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", 2013,
    Algorithm 1.
    """
    max_norm = checked_norm("clip_grad_norm_", "max_norm", max_norm, or_zero=True)
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    numbers = {id(param.grad): i for i, param in enumerate(params)}

    def explained(error: Exception, here: list[Tensor]) -> Exception:
        def name_of(_: str, i: int) -> str:
            return f"gradient of parameters[{numbers[id(here[i])]}]"

        return renamed(error, "clip_grad_norm_", name_of)

    with torch.no_grad():
        norm = _total(grads, explained).sqrt()
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}, expected a finite"
                " number; to clip anyway, leave out error_if_nonfinite"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1).float()
        for like in _alike(list(map(local, grads)), by_dtype=True):
            torch._foreach_mul_(like, factor.to(like[0].device))
    return norm_in_float32(norm, norm.isfinite())


def checked_norm(owner: str, name: str, value: object, *, or_zero: bool = False) -> float:
    """Return the largest norm to leave as it is, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} is {value!r}, expected a number")
    number = float(value)
    if not (number > 0 or (or_zero and number == 0)):
        want = "at least 0" if or_zero else "above 0"
        raise ValueError(f"{owner}: {name} is {value}, expected {want}")
    return number


def norm_in_float32(norm: Tensor, is_sound: Tensor) -> Tensor:
    """Return a norm in float32 that is not finite if and only if it is not sound.

    Args:
        norm: float64, at least 0, inf or NaN. The largest number of float32 stands for one above.
        is_sound: bool.
    """
    return (norm.clamp(max=torch.finfo(torch.float32).max) / is_sound).float()


def total_squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements of all tensors, in float64, over all processes.

    It is not finite if and only if an element is not.

    Args:
        tensors: as for `squared_norms`, but on any devices, and also DTensors, which count whole:
            then every process of their meshes calls this.

    Returns:
        float64, no dimension, on the device of the first tensor (the CPU if there is none).

    Raises:
        ValueError: a tensor is of a wrong kind, such as a Partial DTensor.
    """
    return _total(tensors, lambda error, here: error)


def _total(
    tensors: Sequence[Tensor], explained: Callable[[Exception, list[Tensor]], Exception]
) -> Tensor:
    """Do what total_squared_norm does; say what to raise for an error of some of the tensors."""
    totals = []
    for here in _alike(tensors):
        try:
            squares = sum_over_shards(squared_norms(list(map(local, here))), here)
        except (ValueError, TypeError, RuntimeError) as error:
            told = explained(error, here)
            if told is error:
                raise
            raise told from error
        totals.append(sum_in_order(squares))
    if not totals:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return sum_in_order(torch.stack([total.to(totals[0].device) for total in totals]))


def renamed(error: Exception, owner: str, name_of: Callable[[str, int], str]) -> Exception:
    """Return the error of an op with other names for its tensors; itself if it tells of none.

    Args:
        error: of an op that counts the tensors of a call, and calls them params, grads or tensors.
        owner: what the new one says at its beginning.
        name_of: takes the name of a list and the place in it, and returns the new name.
    """
    op, _, said = str(error).partition(": ")
    pattern = r"\b(params|grads|tensors)\[(\d+)\]"
    text, found = re.subn(pattern, lambda match: name_of(match[1], int(match[2])), said)
    return type(error)(f"{owner}: {text}") if found and op.isidentifier() else error


def _alike(tensors: Sequence[Tensor], by_dtype: bool = False) -> list[list[Tensor]]:
    """Return the tensors of each device, or of each device and dtype, in the order of the first."""
    alike: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kind = (local(tensor).device, tensor.dtype if by_dtype else None)
        alike.setdefault(kind, []).append(tensor)
    return list(alike.values())
