"""What a call allocates: counted by torch on CUDA, and on the CPU by a library before malloc.

Kernels may have memory of their own. That library is there from the beginning of a process, which
runs this file as a program: it calls a function of a test's module.
"""

import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import warm_python

OBJECTS = 8192  # bytes of Python and of torch's graph, whatever the size of tensors
# Calls a function; returns its result, and the bytes that it had at most beside those before it.
Taken = Callable[..., tuple[Any, int]]


def measured(function: Callable[[str, Taken], Any], device: str) -> Any:
    """Return function(device, taken), which JSON can hold."""
    if device == "cuda":
        return function(device, on_cuda)
    library = f"{_folder().name}/allocated.so"
    program = (__file__, library, function.__module__, function.__name__)
    done = warm_python.run(*program, preload=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def share(extra: int, size: int) -> float:
    """Return what a call takes beside its results as a share of its operands."""
    return (extra - OBJECTS) / size


def on_cuda(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, int]:
    """Return the result of a call, and the bytes that it had at most on CUDA."""

    # What was asked for: of what torch keeps, it gives out pieces that are larger by up to a MiB.
    def requested(when: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    result = call(*args, **options)
    return result, requested("peak") - before


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the library, which goes when this process does."""
    folder = tempfile.TemporaryDirectory()
    source = Path(__file__).parents[1] / "csrc/allocated.cpp"
    command = [os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC", source]
    subprocess.run([*command, "-o", f"{folder.name}/allocated.so"], check=True)
    return folder


if __name__ == "__main__":
    torch.set_num_threads(2)  # so that what each of them takes is seen
    library = ctypes.CDLL(sys.argv[1])
    begin, most = library.dsx_allocated_begin, library.dsx_allocated_most
    begin.restype = most.restype = ctypes.c_longlong

    def on_the_cpu(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, int]:
        before = begin()
        result = call(*args, **options)
        return result, most() - before

    function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
    print(json.dumps(function("cpu", on_the_cpu)))
