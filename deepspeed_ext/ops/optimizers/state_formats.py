"""Compact forms of optimizer state, in plain torch: 8-bit codes, and float32 in two halves.

The step ops read and write these forms themselves; this is their definition, for whoever converts
state from one form to another. Elements count in the order in which a dense tensor lies in memory.
"""

import torch
from torch import Tensor

from deepspeed_ext.ops._library import refuse_gradients

BLOCK = 256  # elements that share a scale
_RANDOM_BITS = 19  # of a float's bits, what a code leaves out
_SIGNED_FLOOR, _UNSIGNED_FLOOR = 2.0**-7, 2.0**-15
_MASK32 = 0xFFFFFFFF


def blocks_of(elements: int) -> int:
    """Return how many scales a tensor of so many elements has."""
    return -(-elements // BLOCK)


def encode_blocks(
    values: Tensor, *, signed: bool, were_coded: bool = False
) -> tuple[Tensor, Tensor]:
    """Store values as 8-bit codes with one scale for each block of 256, rounded to the nearest.

    A value is off by at most (|value| + floor * scale) / 16, where the scale is at most 1.04 times
    the largest magnitude of the block and the floor is 2^-7 (signed) or 2^-15 (unsigned); that
    holds for stochastic rounding too, and half of it for this. An unsigned 0 becomes the least code
    in a block that is not all zeros.

    Args:
        values: any shape, dense, of a floating dtype; not negative if not signed.
        signed: 7 bits over 8 binades and a sign, else 8 bits over 16 binades.
        were_coded: values may be decoded ones, which then stay as they are: a step rounds them at
            random and may leave a block whose largest value asks for another scale.

    Returns:
        The codes, uint8, in the shape and layout of values; the scales, float32, (blocks,). A block
        with inf or NaN in it, or magnitudes from 2^125 on, has the scale NaN.

    Raises:
        RuntimeError: values require a gradient, which codes have none of.
    """
    refuse_gradients("encode_blocks", {"values": values})
    flat = in_memory_order(values).float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(1) if padded.numel() else padded.new_zeros(0)
    exponents = ((largest * 1.04).view(torch.int32) >> 23).clamp(min=1)
    scales = (exponents << 23).view(torch.float32)
    scales = torch.where(largest == 0, 0.0, scales)
    scales = torch.where(largest < 2.0**125, scales, float("nan"))
    codes = _encode(padded, scales, signed)
    for other in (scales * 2, scales / 2) if were_coded else ():
        others = _encode(padded, other, signed)
        better = _is_exact(padded, others, other, signed) & ~_is_exact(
            padded, codes, scales, signed
        )
        codes = torch.where(better[:, None], others, codes)
        scales = torch.where(better, other, scales)
    stored = torch.empty_like(values, dtype=torch.uint8)
    in_memory_order(stored).copy_(codes.flatten()[: flat.numel()])
    return stored, scales


def _encode(blocks: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the codes of (n, BLOCK) values at these scales (n,), as integers."""
    inverses = ((254 << 23) - scales.view(torch.int32)).view(torch.float32)
    floor = _floor(signed, blocks.device)
    floors = floor.expand_as(blocks).copysign(blocks) if signed else floor
    sums = (blocks * inverses[:, None] + floors).view(torch.int32).long() & _MASK32
    sums += 1 << (_RANDOM_BITS - 1)
    if signed:
        return (sums >> _RANDOM_BITS & 0x7F) | (sums >> 24 & 0x80)
    least = (floor.view(torch.int32) >> _RANDOM_BITS) + 1
    return (sums >> _RANDOM_BITS).clamp(min=least) & 0xFF


def _floor(signed: bool, device: torch.device) -> Tensor:
    value = _SIGNED_FLOOR if signed else _UNSIGNED_FLOOR
    return torch.tensor(value, device=device, dtype=torch.float32)


def _is_exact(blocks: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return for each block whether the codes at this scale stand for just its values.

    Zeros do not count: the last block may be filled up with them, and no unsigned code is 0.
    """
    return ((_decode(codes, signed) * scales[:, None] == blocks) | (blocks == 0)).all(1)


def decode_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values that codes stand for, in the shape and layout of the codes.

    Args:
        codes: uint8, any shape, dense.
        scales: float32, at least one for each block of codes.
        signed: as when they were encoded.
    """
    flat = in_memory_order(codes).int()
    each = scales[: blocks_of(flat.numel())].repeat_interleave(BLOCK)[: flat.numel()]
    decoded = torch.empty_like(codes, dtype=torch.float32)
    in_memory_order(decoded).copy_(_decode(flat, signed) * each)
    return decoded


def _decode(codes: Tensor, signed: bool) -> Tensor:
    """Return the values of integer codes at scale 1."""
    floor = _floor(signed, codes.device)
    bits = (codes.int() & (0x7F if signed else 0xFF)) << _RANDOM_BITS
    values = (bits + floor.view(torch.int32)).view(torch.float32) - floor
    return torch.where(codes & 0x80 != 0, -values, values) if signed else values


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values as their bfloat16, rounded half up, and the 16 bits left out (int16).

    Half up, not half to even: only then do 16 bits suffice to restore all 32.

    Raises:
        ValueError: values are not float32.
        RuntimeError: they require a gradient, which would be lost.
    """
    refuse_gradients("split_float32", {"values": values})
    if values.dtype != torch.float32:
        raise ValueError(f"split_float32: values is {values.dtype}, expected float32")
    bits = torch.where(values.isnan(), float("nan"), values).view(torch.int32)
    upper = ((bits.long() & _MASK32) + 0x8000) >> 16
    return _as_int16(upper).view(torch.bfloat16), _as_int16(bits.long() & 0xFFFF)


def join_float32(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the float32 values that `split_float32` made two tensors of, bit for bit.

    A zero in `upper` with a negative `lower`, which it never makes, stands for itself.

    Raises:
        RuntimeError: upper requires a gradient, which would be lost.
    """
    refuse_gradients("join_float32", {"upper": upper})
    bits = (upper.view(torch.int16).long() << 16) + lower.long()
    signed = (bits & _MASK32) - ((bits & 0x80000000) << 1)
    joined = signed.to(torch.int32).view(torch.float32)
    return torch.where(joined.isnan(), upper.float(), joined)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as they lie in memory, as a view.

    Raises:
        ValueError: there are gaps between the elements, or they overlap.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"in_memory_order: tensor has strides {list(tensor.stride())} for shape"
            f" {list(tensor.shape)}, expected a dense layout, without gaps or overlaps"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _as_int16(values: Tensor) -> Tensor:
    return (values - ((values & 0x8000) << 1)).to(torch.int16)
