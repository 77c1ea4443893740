"""Functional ops on the CPU whose results go past the cache: the bits are those of smaller ones."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_ext.ops import bias_activation, gated_activation, layer_norm, rms_norm, rope, softmax

CPU = Path("/proc/cpuinfo").read_text()
Op = Callable[..., Tensor]
WEIGHT = torch.linspace(0.5, 1.5, 4096)
FREQUENCIES = 10000.0 ** -torch.linspace(0, 1, 64)


def norm(function: Op, x: Tensor) -> Tensor:
    return function(x, WEIGHT[: x.shape[-1]].to(x.dtype))


def rotated(x: Tensor, interleaved: bool) -> Tensor:
    """Turn heads of 128 by the same angles in each row."""
    heads = x.unflatten(-1, (-1, 128))
    positions = torch.zeros(len(x), dtype=torch.long) + 77
    return rope(heads, None, positions, FREQUENCIES, interleaved=interleaved).flatten(-2)


OPS: dict[str, Op] = {
    "rms_norm": partial(norm, rms_norm),
    "layer_norm": partial(norm, layer_norm),
    "gelu": bias_activation,
    "swiglu": lambda x: gated_activation(x, x.flip(0)),
    "softmax": softmax,
    "rope": partial(rotated, interleaved=False),
    "rope, interleaved": partial(rotated, interleaved=True),
}


def results(op: Op, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = op(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, grad)[0]


CASES = [(name, 4096, dtype) for name in OPS for dtype in (torch.float32, torch.bfloat16)]
CASES += [(name, 4096 - 8, torch.bfloat16) for name in OPS if "rope" not in name]
CASES += [("gelu", 4096, torch.float16)]


@pytest.mark.parametrize(("name", "width", "dtype"), CASES)
def test_a_large_one_is_its_parts(name: str, width: int, dtype: torch.dtype) -> None:
    """17 MiB at once, by threads whose shares end anywhere, and in quarters."""
    rows = (17 << 20) // (4096 * dtype.itemsize) // 8 * 8
    made = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(rows, width, generator=made).to(dtype) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = results(OPS[name], x, grad)
    finally:
        torch.set_num_threads(threads)
    for begin in range(0, rows // 2, rows // 8):
        # Rows from both ends, as a gate's other half comes from the other one.
        part = torch.tensor([*range(begin, begin + rows // 8)])
        part = torch.cat([part, rows - 1 - part.flip(0)])
        for got, want in zip(whole, results(OPS[name], x[part], grad[part]), strict=True):
            assert torch.equal(got[part], want)


@pytest.mark.skipif("avx512f" not in CPU, reason="the processor has no AVX-512")
def test_by_avx2() -> None:
    """The same by the processor's other instructions for it, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-k", "parts and 4096"]
    environ = os.environ | {"DSX_FORCE_ISA": "avx2", "PYTEST_ADDOPTS": ""}  # all, of any share
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
