"""State dicts for tests, and how two of them are compared bit by bit."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.io.checkpoint.saved_tensors import TORCH_DTYPES

MIB = 1 << 20
DTYPES = sorted(TORCH_DTYPES.values(), key=str)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Return a tensor of random bits, NaNs with payloads and odd booleans among them."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def mixed_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of all dtypes and of sizes around those where a path ends: 20 MiB in all."""
    state = {
        f"{dtype}.{shape}": random_tensor(shape, dtype, seed + i)
        for i, dtype in enumerate(DTYPES)
        for shape in ((1,), (3, 5), (2, 0), (0,), (1000, 2))
    }
    state["zero-dim"] = random_tensor((), torch.float64, seed)
    for nbytes in (4096, 8192, MIB - 4, MIB, MIB + 4, 2 * MIB + 4096, 5 * MIB + 40):
        state[f"float32 {nbytes}"] = random_tensor((nbytes // 4,), torch.float32, seed)
    for nbytes in (4095, 4097, MIB - 1, MIB + 1, 3 * MIB + 777):
        state[f"uint8 {nbytes}"] = random_tensor((nbytes,), torch.uint8, seed)
    for name in ("", 'ä.ß/\U0001f600 "quoted" \\ \n\0', "a" * 3000):
        state[name] = random_tensor((7,), torch.int16, seed)
    return state


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have another


def assert_same_tensor(got: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    assert got.dtype == expected.dtype, name
    assert got.shape == expected.shape, name
    assert torch.equal(bits(got), bits(expected)), name


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_tensor(got[name], tensor, name)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header as JSON and where the data begin."""
    file = path.read_bytes()
    length = struct.unpack("<Q", file[:8])[0]
    return json.loads(file[8 : 8 + length]), 8 + length
