"""The weight of a linear layer quantized, in one pass, in the order that kernels read."""

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_on_tensors, define
from deepspeed_ext.ops.quantization.formats import number_of
from deepspeed_ext.ops.quantization.packed_weight import (
    PackedWeight,
    pack_weight,
    unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.quantize import LIBRARIES, quantize_ref

_op = define(
    "quantize_packed_(Tensor x, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? offsets,"
    " Tensor(d!)? errors, *, int format, int group_size) -> ()",
    LIBRARIES,
)


def quantize_packed_(x: Tensor, weight: PackedWeight, errors: Tensor | None = None) -> None:
    """Quantize the floats of a weight into the tensors of a packed one.

    All that these have is written, to the bit what ``pack_weight`` makes of ``quantize``, on the
    CPU with any number of threads and any instruction set, and on CUDA. Errors are the same in
    every call with the same arguments, and on CUDA differ from those of the CPU by rounding.

    Args:
        x: (n, length), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one
            piece each are read as they lie; other layouts are copied first.
        weight: where to write; format, group_size, and whether there are offsets, say how. Codes
            are contiguous; groups of scales, and of offsets, may lie further apart, as in some
            columns of a larger tensor, which is another one for each.
        errors: (n, 2), float64, or None. Of each row the largest \\|x - value\\|, in parts of the
            scale of its group, and the sum of (x - value)^2, where a value is what a code stands
            for. NaN if the row is not finite.

    Raises:
        RuntimeError: a gradient, or a tangent, would be lost.

    See: csrc/quantization/packed_weight.h and formats.h; ``quantize_packed_ref_`` is the same in
    float64.
    """
    _check_length("quantize_packed_", x, weight)
    codes, scales, offsets, format, group_size, _ = weight
    call_on_tensors(
        _op,
        x,
        codes,
        scales,
        offsets,
        errors,
        format=number_of("quantize_packed_", format),
        group_size=group_size,
    )
    written = (codes, scales, offsets, errors)
    torch.autograd.graph.increment_version([each for each in written if each is not None])


def _check_length(op: str, x: Tensor, weight: PackedWeight) -> None:
    """Refuse rows of another length, which the op would take: those of codes are padded."""
    if x.dim() == 2 and x.shape[1] != weight.length:
        want = [x.shape[0], weight.length]
        raise ValueError(f"{op}: x has shape {list(x.shape)}, expected {want}")


def quantize_packed_ref_(x: Tensor, weight: PackedWeight, errors: Tensor | None = None) -> None:
    """Do what quantize_packed_ does, in float64 and plain torch: its definition, for tests.

    Halfway between two codes quantize_packed_ may choose the other one.
    """
    _check_length("quantize_packed_ref_", x, weight)
    format, group_size, symmetric = weight.format, weight.group_size, weight.offsets is None
    made = quantize_ref(x, format, group_size=group_size, symmetric=symmetric)
    packed = pack_weight(*made, format=format, group_size=group_size, length=x.shape[1])
    for target, source in zip(weight[:3], packed[:3], strict=True):
        if target is not None and source is not None:
            target.copy_(source)
    if errors is None:
        return
    off = (x.double() - unpack_weight_ref(packed)).abs()
    scales = made.scales.double().repeat_interleave(group_size, 1)[:, : x.shape[1]]
    errors.zero_()
    if x.numel() > 0:
        errors[:, 0] = (off / scales).amax(1)
        errors[:, 1] = off.square().sum(1)
