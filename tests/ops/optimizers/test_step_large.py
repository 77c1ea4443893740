"""adam_step_: tensors of more than 2^31 elements."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from step_cases import BF16
from torch import Tensor

from deepspeed_ext.ops import adam_step_

ELEMENTS = 2**31 + 3
RING = 32 << 20  # bytes


@contextmanager
def on_ring(elements: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor whose memory repeats every RING bytes, so that it takes no more than these.

    The same pages of an anonymous file are mapped again and again, one after the other.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    rings = -(-elements * dtype.itemsize // RING)
    file = os.memfd_create("ring")
    os.ftruncate(file, RING)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = libc.mmap(None, rings * RING, 0, flags, -1, 0)
    try:
        for i in range(rings):
            access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10  # MAP_FIXED
            place = libc.mmap(reserved + i * RING, RING, access, mmap.MAP_SHARED | fixed, file, 0)
            assert place == reserved + i * RING, os.strerror(ctypes.get_errno())
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(reserved)
        yield torch.frombuffer(memory, dtype=dtype)
    finally:
        libc.munmap(reserved, rings * RING)
        os.close(file)


def test_every_element_is_visited_once() -> None:
    """With these options every visit takes 1 from the param, so the ring counts its visits."""
    per_ring = RING // BF16.itemsize
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads would count at the same place at the same time
    try:
        with (
            on_ring(ELEMENTS, BF16) as param,
            on_ring(ELEMENTS, BF16) as grad,
            on_ring(ELEMENTS, BF16) as exp_avg,
            on_ring(ELEMENTS, BF16) as exp_avg_sq,
        ):
            grad[:per_ring] = 1
            step = torch.zeros(())
            numbers = dict(lr=1.0, betas=(0.0, 0.0), eps=0.0)
            adam_step_([param], [grad], [exp_avg], [exp_avg_sq], [step], **numbers)
            visits = -param[:per_ring].float()
            del param, grad, exp_avg, exp_avg_sq
    finally:
        torch.set_num_threads(before)
    want = torch.full((per_ring,), float(ELEMENTS // per_ring))
    want[: ELEMENTS % per_ring] += 1
    assert torch.equal(visits, want)


def test_on_cuda(cuda: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs a CUDA GPU with 24 GiB of free memory")
    tensors = [torch.zeros(ELEMENTS, dtype=BF16, device=cuda) for _ in range(3)]
    grad = torch.ones(1, dtype=BF16, device=cuda).expand(ELEMENTS).contiguous()
    param, exp_avg, exp_avg_sq = tensors
    step = torch.zeros((), device=cuda)
    adam_step_([param], [grad], [exp_avg], [exp_avg_sq], [step], lr=1.0, betas=(0.0, 0.0), eps=0.0)
    for tensor, want in ((param, -1), (exp_avg, 1), (exp_avg_sq, 1)):
        assert tensor.amin() == want and tensor.amax() == want
