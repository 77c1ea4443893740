"""A quick run of the I/O engine, for ds_report; it raises when a byte is not where it should be."""

import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from deepspeed_ext.io.engine.async_io import AsyncIO

_LENGTH = 1_000_003  # of the file; nothing about it is aligned
_CUTS = (0, 1, 4_095, 4_096, 70_001, 524_288, 999_999, _LENGTH)


def async_io(device: str) -> None:
    """Write a file in odd pieces at once, read it in others, and compare bytes and length.

    Args:
        device: "cpu"; the engine itself runs nowhere else.

    Raises:
        RuntimeError: a byte or the length is wrong.
        OSError: the temporary folder cannot be written or read.
        BuildError: the native library could not be built or loaded.
    """
    generator = torch.Generator().manual_seed(0)
    want = torch.randint(0, 256, (_LENGTH,), dtype=torch.uint8, generator=generator)
    got = torch.zeros(_LENGTH + 1, dtype=torch.uint8, device=device)[1:]  # at an odd address
    with tempfile.TemporaryDirectory() as folder, AsyncIO(block_size=1 << 16) as engine:
        path = Path(folder) / "check"
        pieces = list(pairwise(_CUTS))
        for begin, end in reversed(pieces):
            engine.write(want[begin:end], path, offset=begin)
        engine.wait()
        if path.stat().st_size != _LENGTH:
            size = path.stat().st_size
            raise RuntimeError(f"async_io: file has {size} bytes, expected {_LENGTH}")
        middle = _LENGTH // 2
        engine.read(got[middle:], path, offset=middle)
        engine.read(got[:middle], path)
        engine.wait()
    wrong = (got.cpu() != want).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise RuntimeError(f"async_io: byte {i} is {int(got[i])}, expected {int(want[i])}")
