"""Clip as part of a step: the norm of all gradients, and what the step divides them by."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, sum_over_shards
from deepspeed_ext.ops.optimizers.clip import norm_in_float32
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms, sum_in_order
from deepspeed_ext.optim.buckets import BucketView

# Below the largest float32 by more than what rounding can add.
_LARGEST = 2.0**127


class Scaling(NamedTuple):
    """How the gradients of a step are scaled; on any device.

    Attributes:
        grad_scale: None, or one element that gradients are divided by.
        found_inf: None, or one element, not 0 if nothing may be stepped.
        div_scale: None, or another number that they are divided by.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    div_scale: float | None = None

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the divisor and found_inf on this device; nothing waits for it."""
        divisor = moved(self.grad_scale, device)
        if self.div_scale is not None:
            # Made on the device, so that a CUDA graph can have it.
            number = torch.full((), self.div_scale, dtype=torch.float64, device=device)
            divisor = number if divisor is None else number * divisor.reshape(())
        return divisor, moved(self.found_inf, device)


class Scalars(NamedTuple):
    """The numbers of a step that may be on the device."""

    lr: float | Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None


def scalars_of(group: Mapping[str, Any], device: torch.device, scaling: Scaling) -> Scalars:
    """Return the numbers of a step of a group on this device."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device != device:
        lr = float(lr) if "cpu" in (lr.device.type, device.type) else moved(lr, device)
    return Scalars(lr if isinstance(lr, Tensor) else float(lr), *scaling.on(device))


class Clip(NamedTuple):
    """What a step needs to clip, on one device, no dimension.

    Attributes:
        norm: float32, of the unscaled gradients; inf or NaN if and only if nothing may be stepped.
        divisor: float64, that gradients are divided by, to unscale and to clip them.
        found_inf: float32, 1 if nothing may be stepped, else 0.
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor


class SquareSum:
    """The sum of squares of gradients, over devices and over the processes that hold shards."""

    def __init__(self) -> None:
        self._whole: list[Tensor] = []
        self._shards: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, view: BucketView) -> None:
        """Take in the gradients of a bucket, one read of them; nothing waits for the device."""
        self.add_squares(squared_norms(view.grads), view.owners)

    def add_sparse(self, view: BucketView) -> None:
        """Do the same where some gradients are sparse, which the op does not take."""
        self.add_squares(squared_norms(list(map(_elements, view.grads))), view.owners)

    def add_squares(self, squares: Tensor, owners: Sequence[Tensor]) -> None:
        """Take in sums of squares that are known: float64, one for each of these parameters."""
        if not is_dtensor(owners[0]):
            self._whole.append(sum_in_order(squares))
            return
        parts, known = self._shards.setdefault(squares.device, ([], []))
        parts.append(squares)
        known += owners

    def total(self) -> Tensor:
        """Return the sum: float64, on the CPU if some gradients are there.

        There is one exchange for each mesh and set of sharded dimensions, so all processes that
        hold shards call this.
        """
        sums = self._whole + [
            sum_in_order(sum_over_shards(torch.cat(parts), owners))
            for parts, owners in self._shards.values()
        ]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        there: dict[torch.device, list[Tensor]] = {}
        for each in sums:
            there.setdefault(each.device, []).append(each)
        of_devices = [sum_in_order(torch.stack(parts)) for parts in there.values()]
        device = min(there, key=lambda device: device.type != "cpu")
        return sum_in_order(torch.stack([moved(each, device) for each in of_devices]))


def clip(total: Tensor, max_norm: float, scaling: Scaling) -> Clip:
    """Return what a step needs to scale gradients so that their norm is at most max_norm.

    Args:
        total: sum of squares of all gradients, float64, no dimension; not finite if one has inf.
        max_norm: above 0.
        scaling: of the gradients. If the divisor is 0, inf or NaN, or so small that gradients
            divided by it would leave the range of float32 and are not clipped to less, nothing may
            be stepped.
    """
    norm, is_sound = total.sqrt(), total.isfinite()
    grad_scale, found_inf = scaling.on(total.device)
    if found_inf is not None:
        is_sound = is_sound.logical_and(found_inf.reshape(()) == 0)
    if grad_scale is None:
        divisor = norm.add(1e-6).div_(max_norm).clamp_(min=1)
    else:
        scale = grad_scale.reshape(()).double()
        size = scale.abs()
        # Not by way of the unscaled norm: with a tiny scale that may be too large even for float64.
        divisor = norm.add(size, alpha=1e-6).div_(max_norm).maximum(size)
        # Where the step divides by less than 1, neither the gradients nor its float32 factor,
        # 1 / divisor, become inf. A factor that is subnormal instead, as the divisor is huge, moves
        # no element by more than 2**-22, which is half its last bit times the largest gradient.
        fits = norm.clamp(1, _LARGEST) <= divisor * _LARGEST
        is_sound = is_sound.logical_and(size > 0).logical_and_(size < math.inf).logical_and_(fits)
        norm, divisor = norm / size, divisor.copysign_(scale)
    return Clip(norm_in_float32(norm, is_sound), divisor, is_sound.logical_not().float())


@overload
def moved(tensor: Tensor, device: torch.device) -> Tensor: ...


@overload
def moved(tensor: Tensor | None, device: torch.device) -> Tensor | None: ...


def moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the tensor on this device; one that leaves the CPU need not be waited for."""
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")  # the host must not read too early


def _elements(grad: Tensor) -> Tensor:
    """Return a gradient without the zeros that a sparse one has only in name."""
    return grad.coalesce().values() if grad.is_sparse else grad
