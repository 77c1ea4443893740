"""Functional ops: no memory beside their results, but 1 % of what their operands take.

On CUDA torch's allocator counts. On the CPU a library does that stands before malloc, as kernels
may have memory of their own; it is there from the beginning of a process, which measures all ops.
"""

import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from functional_cases import CASES, Call, Case, Recorder, call_of
from rms_norm_cases import BF16, F32
from torch import Tensor

# Rows and their length. Of under 200 classes, cross_entropy's loss of each row is over 1 %.
SHAPES = [(4000, 264), (257, 4096), (65, 16_384), (8, 131_072)]
DTYPES = {"bf16": (BF16, BF16), "bf16 and fp32": (BF16, F32)}
COUNTER = Path(__file__).parents[1] / "csrc/allocated.cpp"
OBJECTS = 8192  # bytes of Python and of torch's graph, whatever the size of tensors
EXCEPTED = {  # of backward; by the beginnings of what is measured
    "gated_activation of halves, ": "torch adds up the gradients of slices",
    "softmax with an added mask, bf16 and fp32": "the gradient of a mask is cast to its dtype",
    "softmax with a mask added to all, ": "the gradient of a mask is added up from that of scores",
    # Of few rows they are much beside those: such gradients should go down the columns.
    **dict.fromkeys(
        ("rms_norm, ", "rms_norm of a sum", "layer_norm, ", "layer_norm of a sum"),
        "sums of each group of rows for the gradients of vectors",
    ),
}
CONTROL = {"takes a copy": Case(lambda x: (x * 2) * 3, lambda n: [(n,)])}
Begin = Callable[[], int]  # returns the bytes that are allocated
Most = Callable[[], int]  # the most that were since then


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of their memory, once where they share it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def shares(call: Call, begin: Begin, most: Most) -> list[float]:
    """Return what forward and backward take beside their results, as shares of their operands.

    What an op keeps for its gradient is among its results.
    """
    call.run()  # loads the library
    leaves, recorder = call.leaves(), Recorder()
    with recorder:
        before = begin()
        results = call.forward(leaves)
        forward = most() - before - bytes_of([*results, *recorder.results])
    recorder.results.clear()
    before = begin()
    grads = torch.autograd.grad(results, leaves, call.grads)
    backward = most() - before - bytes_of(grads)
    operands = bytes_of(call.tensors())
    of_both = (forward, operands), (backward, operands + bytes_of(call.grads))
    return [(extra - OBJECTS) / size for extra, size in of_both]


def measure(device: str, begin: Begin, most: Most) -> dict[str, list[float]]:
    """Return the shares of each case, mixture of dtypes and shape."""
    found = {}
    cases = CASES | CONTROL
    shares(call_of(cases["softmax"], 2, 8, BF16, device), begin, most)  # what torch imports
    for name, mixture, (rows, n) in itertools.product(cases, DTYPES, SHAPES):
        width = sum(math.prod(shape) for shape in cases[name].of_rows(n)) // n
        rows = math.ceil(rows / width)
        dtype, others = DTYPES[mixture]
        call = call_of(cases[name], rows, n, dtype, device, others=others)
        found[f"{name}, {mixture}, {rows} x {n}"] = shares(call, begin, most)
    return found


@cache
def measured_on_cuda() -> dict[str, list[float]]:
    def begin() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    return measure("cuda", begin, torch.cuda.max_memory_allocated)


@cache
def measured_on_the_cpu() -> dict[str, list[float]]:
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
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def measured(name: str, device: str) -> dict[str, list[float]]:
    """Return what was measured of one case."""
    of_all = measured_on_cuda() if device == "cuda" else measured_on_the_cpu()
    found = {key: value for key, value in of_all.items() if key.startswith(f"{name}, ")}
    assert len(found) == len(DTYPES) * len(SHAPES)
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_more_than_a_hundredth(name: str, device: str) -> None:
    too_much = {key: value for key, value in measured(name, device).items() if max(value) > 0.01}
    reasons = set()
    for beginning, reason in EXCEPTED.items():
        for key, (forward, _) in list(too_much.items()):
            if key.startswith(beginning) and forward <= 0.01:
                del too_much[key]
                reasons.add(reason)
    assert too_much == {}
    if reasons:
        pytest.xfail(", ".join(reasons))


def test_a_copy_is_noticed(device: str) -> None:
    (name,) = CONTROL
    assert all(min(value) > 0.45 for value in measured(name, device).values())


if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])
    begin, most = library.dsx_allocated_begin, library.dsx_allocated_most
    begin.restype = most.restype = ctypes.c_longlong
    print(json.dumps(measure("cpu", begin, most)))
