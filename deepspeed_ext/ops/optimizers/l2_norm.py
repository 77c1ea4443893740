"""Sums of squares and L2 norms of lists of tensors, without a host synchronisation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import call_recording_nothing, define

_squared_norms_op = define(
    "squared_norms(Tensor[] tensors) -> Tensor",
    {"cpu": "cpu_l2_norm", "cuda": "fused_l2_norm"},
    fake=lambda tensors: tensors[0].new_empty(len(tensors), dtype=torch.float64),
)


class L2Norm(NamedTuple):
    """What `l2_norm` returns; all float32, on the device of the tensors."""

    norm: Tensor
    per_tensor: Tensor
    found_inf: Tensor


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, in float64, without waiting for the device.

    A sum is not finite if and only if an element of its tensor is not: no finite value is too large
    or too small for it. On the CPU the bits depend neither on the number of threads nor on the
    instruction set; on CUDA they are the same in every run, and a graph can capture the call. The
    op has no gradient, and raises when one is wanted. `total_squared_norm` is for several devices
    and for DTensors.

    Args:
        tensors: float32, bfloat16 or float16, also mixed; any shapes and layouts (those with gaps
            or overlaps are copied first), on one device. Not modified.

    Returns:
        float64 (n,) on the device of the tensors; on the CPU if there are none.

    See: ``squared_norms_ref`` is the same in plain torch.
    """
    if not tensors:  # so no device to dispatch on
        check_kinds("squared_norms", tensors=(tensors, Sequence))
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    squares: Tensor = call_recording_nothing(_squared_norms_op, tensors)
    return squares


def squared_norms_ref(tensors: Sequence[Tensor]) -> Tensor:
    """Do what squared_norms does, in float64 and plain torch: its definition, for tests."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    return torch.stack([tensor.detach().double().square().sum() for tensor in tensors])


def sum_in_order(squares: Tensor) -> Tensor:
    """Return the sum of a vector, with the same bits on every CPU.

    Args:
        squares: float64 (n,).

    Returns:
        float64, no dimension.
    """
    if squares.is_cpu and squares.numel() > 0:  # torch's sum depends on the instruction set there
        return squares.cumsum(0)[-1]
    return squares.sum()


def l2_norm(tensors: Sequence[Tensor]) -> L2Norm:
    """Return the L2 norm of all elements of all tensors, that of each tensor, and a flag for inf.

    Nothing waits for the device. The sums are those of `squared_norms`, in float64, so a finite
    gradient never overflows them; only the norm itself can be too large for float32, and is inf
    then, while `found_inf` stays 0.

    Args:
        tensors: as for `squared_norms`.

    Returns:
        The norm, float32 without a dimension, 0 if there are no elements; that of each tensor,
        float32 (n,); found_inf, float32 without a dimension, 1 if an element is inf or NaN, else 0,
        as GradScaler and the optimizer steps have it.

    See: ``l2_norm_ref`` is the same in plain torch.
    """
    squares = squared_norms(tensors)
    total = sum_in_order(squares)
    return L2Norm(total.sqrt().float(), squares.sqrt().float(), (~total.isfinite()).float())


def l2_norm_ref(tensors: Sequence[Tensor]) -> L2Norm:
    """Do what l2_norm does, in float64 and plain torch: its definition, for tests."""
    squares = squared_norms_ref(tensors)
    total = squares.sum()
    return L2Norm(total.sqrt(), squares.sqrt(), (~total.isfinite()).double())
