"""Inputs that the tests of squared norms share. Run as a program, it prints a digest of results."""

import ctypes
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from deepspeed_ext.ops import squared_norms

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = 65536  # of the CPU; those of CUDA are half as long
# Around every vector width, block of float sums and chunk, and several chunks.
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 2047, 2048, 2049, 8191, 8193]
SIZES += [CHUNK // 2 - 1, CHUNK // 2 + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]
SCALES = {"ordinary": 1.0, "huge": 1e37, "tiny": 1e-25, "subnormal": 1e-40}


def make(
    dtype: torch.dtype, scale: float = 1.0, device: str = "cpu", shift: int = 0
) -> list[Tensor]:
    """A tensor of each size, the same on every device, beginning `shift` elements into memory."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shift + n, generator=generator) * scale for n in SIZES]
    return [tensor.to(device, dtype)[shift:] for tensor in made]


def results() -> Iterator[Tensor]:
    """What squared_norms returns on the CPU, in all cases."""
    for dtype in DTYPES:
        for scale in SCALES.values():
            for shift in (0, 1):
                yield squared_norms(make(dtype, scale, shift=shift))


def digest() -> str:
    """A hash of all results: equal digests mean equal bits."""
    state = hashlib.sha256()
    for result in results():
        state.update(ctypes.string_at(result.data_ptr(), result.nbytes))
    return state.hexdigest()


if __name__ == "__main__":
    print(digest())
