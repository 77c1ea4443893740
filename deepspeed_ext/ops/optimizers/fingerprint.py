"""Fingerprints of lists of tensors, without a host synchronisation: were they written to since?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_recording_nothing, define

_fingerprints_op = define(
    "fingerprints(Tensor[] tensors) -> Tensor",
    {"cpu": "cpu_l2_norm", "cuda": "fused_l2_norm"},
    fake=lambda tensors: tensors[0].new_empty(len(tensors), dtype=torch.int64),
)


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return 64 bits of each tensor that change when its memory does, without waiting for it.

    They depend on the number of bytes, on every bit and on its place: an element that changed, a
    sign, also that of a zero, two elements that changed places, a NaN of another payload, all
    elements times 0.5. A change is missed by chance once in 2^64; on purpose one can be made that
    is, so this is no checksum against attackers. The same bytes have the same fingerprint on every
    device, with any number of threads and instruction set, whatever their shape and dtype; on CUDA
    a graph can capture the call. The memory is read once. The op has no gradient, and raises when
    one is wanted.

    Args:
        tensors: of at most 8 bytes an element, also mixed; any shapes and layouts, on one device.
            Elements are taken in the order in which they lie in memory, or, if they do not fill
            their memory once, in that of the indices, of a copy. Of a DTensor, pass what
            ``to_local()`` returns. Not modified.

    Returns:
        int64 (n,) on the device of the tensors; on the CPU if there are none. 0 of no elements.

    See: NH in Black et al., "UMAC: Fast and Secure Message Authentication", 1999.
        ``fingerprints_ref`` is the same in plain torch.
    """
    if not tensors:  # so no device to dispatch on
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    made: Tensor = call_recording_nothing(_fingerprints_op, tensors)
    return made


def fingerprints_ref(tensors: Sequence[Tensor]) -> Tensor:
    """Do what fingerprints does, bit by bit, in plain torch: its definition, for tests."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.stack([_fingerprint_of(_bytes_of(tensor.detach())) for tensor in tensors])


_QUARTER_WORDS, _BLOCK_ROWS = 32, 32
_LOW = 0xFFFFFFFF  # 32 bits


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, or of a contiguous copy if its elements do not fill it."""
    tensor = tensor.resolve_conj().resolve_neg()
    by_stride = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    if not tensor.permute(by_stride).is_contiguous():
        tensor, by_stride = tensor.contiguous(), list(range(tensor.dim()))
    return tensor.permute(by_stride).reshape(-1).view(torch.uint8)


def _fingerprint_of(memory: Tensor) -> Tensor:
    """Return the fingerprint of bytes. int64 wraps around as unsigned integers of 64 bits do."""
    words = 4 * _QUARTER_WORDS
    rows = -(-memory.numel() // (4 * words))
    padded = memory.new_zeros(rows * words * 4)
    padded[: memory.numel()] = memory
    place = torch.arange(words, device=memory.device)
    row = torch.arange(rows, device=memory.device) % _BLOCK_ROWS
    keyed = (padded.view(torch.int32).view(rows, words) + _word_key(place)) & _LOW
    keyed = (keyed + (row * 0x9E3779B9 & _LOW)[:, None]) & _LOW
    a, b, c, d = keyed.view(rows, 4, _QUARTER_WORDS).unbind(1)
    block = torch.arange(rows, device=memory.device) // _BLOCK_ROWS
    blocks = memory.new_zeros(-(-rows // _BLOCK_ROWS), dtype=torch.int64)
    beside = blocks.index_add(0, block, (a * b + c * d).sum(1))
    across = blocks.index_add(0, block, (a * c + b * d).sum(1))
    number = torch.arange(1, len(blocks) + 1, device=memory.device)
    of_blocks = _mixed(_mixed(beside + number * _signed(0x9E3779B97F4A7C15)) ^ across)
    return of_blocks.sum() + _mixed(torch.tensor(memory.numel(), device=memory.device))


def _word_key(place: Tensor) -> Tensor:
    x = place + 1
    x = ((x ^ x >> 16) * 0x7FEB352D) & _LOW
    x = ((x ^ x >> 15) * 0x846CA68B) & _LOW
    return x ^ x >> 16


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted_right(x, 31)


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """Return x / 2^bits of numbers without a sign."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64)
