"""Attention over a cache: beside results, and what chunks find, 1 % of what operands take."""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kv_cases import make_kv
from rms_norm_cases import BF16

from deepspeed_ext.ops import PagedKV, decode_attention, prefill_attention

COUNTER = Path(__file__).parents[2] / "csrc/allocated.cpp"
STORED = [BF16, torch.int8, torch.float8_e4m3fn]
HEADS, GROUP, WIDTH, LENGTHS, WINDOW = 2, 4, 128, [4096, 1000, 2048], 3000
OBJECTS = 8192  # bytes of Python's, whatever the size of tensors
CHUNK = 200  # tokens that are prefill_attention's


def partials(kv: PagedKV, tokens: int) -> int:
    """What chunks find, for all that a slot could have in the window; prefill keeps nothing."""
    if tokens == CHUNK:
        return 0
    chunks = min(-(-kv.table.shape[1] // 4), (WINDOW + tokens + 253) // 256 + 1)
    return len(LENGTHS) * HEADS * chunks * tokens * GROUP * (WIDTH + 16) * 4


def share(
    stored: torch.dtype, tokens: int, device: str, begin: Callable[[], int], most: Callable[[], int]
) -> float:
    """Return what a call takes beside those, as a share of its operands."""
    kv = make_kv(LENGTHS, HEADS, WIDTH, stored, device)
    q = torch.ones((len(LENGTHS), tokens, HEADS * GROUP, WIDTH), dtype=BF16, device=device)
    options = dict(alibi_slopes=torch.ones(8, device=device), window=WINDOW, softcap=3.0)
    op = prefill_attention if tokens == CHUNK else decode_attention
    op(q, kv, **options)  # type: ignore[arg-type]
    before = begin()
    results = op(q, kv, return_lse=True, **options)  # type: ignore[arg-type]
    extra = most() - before - sum(t.nbytes for t in results) - partials(kv, tokens) - OBJECTS
    return extra / sum(t.nbytes for t in (q, *kv) if t is not None)


@pytest.mark.parametrize("tokens", [1, 16, CHUNK])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_no_more_than_a_hundredth_on_cuda(stored: torch.dtype, tokens: int, cuda: str) -> None:
    def begin() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    assert share(stored, tokens, cuda, begin, torch.cuda.max_memory_allocated) <= 0.01


def test_no_more_than_a_hundredth_on_the_cpu() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/allocated.so"
        command = [os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC", COUNTER, "-o", library]
        subprocess.run(command, check=True)
        done = subprocess.run(
            [sys.executable, __file__, library],
            env=os.environ | {"LD_PRELOAD": library},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    found = [float(line) for line in done.stdout.split()]
    assert len(found) == 9 and max(found) <= 0.01


if __name__ == "__main__":
    counter = ctypes.CDLL(sys.argv[1])
    begin, most = counter.dsx_allocated_begin, counter.dsx_allocated_most
    begin.restype = most.restype = ctypes.c_longlong
    for stored in STORED:
        for tokens in (1, 16, CHUNK):
            print(share(stored, tokens, "cpu", begin, most))
