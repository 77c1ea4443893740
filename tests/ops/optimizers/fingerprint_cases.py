"""Inputs that the tests of fingerprints share. Run as a program, it prints what they have."""

import torch
from torch import Tensor

from deepspeed_ext.ops import fingerprints

ROW, BLOCK = 512, 16384  # bytes
CHUNK = 8 * BLOCK  # of a block of CUDA's threads
# Around every row, block and chunk, and several.
SIZES = [0, 1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129, ROW - 1, ROW, ROW + 1, 4 * ROW + 3]
SIZES += [BLOCK - 4, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2 * ROW + 6, 3 * BLOCK + 40]
SIZES += [CHUNK - 2, CHUNK, CHUNK + 8, 3 * CHUNK + BLOCK + 5]
STARTS = [0, 1, 2, 4, 8]  # bytes into memory


def make(device: str = "cpu", start: int = 0) -> list[Tensor]:
    """Bytes of each number, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in SIZES]
    return [torch.cat([tensor.new_zeros(start), tensor]).to(device)[start:] for tensor in made]


def values() -> list[list[int]]:
    """What fingerprints returns on the CPU, in all cases."""
    return [fingerprints(make(start=start)).tolist() for start in STARTS]


if __name__ == "__main__":
    print(values())
