"""The memory ceiling of optimizer steps: a compiled loop of 4 reads and 3 writes, nothing else."""

import ctypes
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from benchmarks.harness import Contender
from deepspeed_ext.op_builder import OpSpec
from deepspeed_ext.op_builder.compile import compile_library

NAME = "stream of 4 reads, 3 writes"
_BYTES = 28  # of one float in each of seven passes


class Stream:
    """A compiled loop that moves a number of bytes, through float tensors of its own."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        spec = OpSpec(
            name="stream",
            device=device,
            sources=("stream.cu" if device == "cuda" else "stream.cpp",),
            needs=("cuda",) if device == "cuda" else (),
        )
        with tempfile.TemporaryDirectory() as folder:
            library = compile_library(spec, Path(folder), csrc=Path(__file__).parent)
            self._stream = ctypes.CDLL(str(library)).stream
        pointers = [ctypes.c_void_p] * (5 if device == "cuda" else 4)
        self._stream.argtypes = [*pointers[:4], ctypes.c_int64, *pointers[4:]]
        self._stream.restype = ctypes.c_int if device == "cuda" else None

    def contender(self, bytes_moved: int, threads: int) -> Contender:
        """Return the loop over as many bytes as the work that it is the ceiling of."""
        n = bytes_moved // _BYTES // 4 * 4
        tensors = [torch.rand(n, device=self.device) for _ in range(4)]
        if self.device == "cuda":
            return Contender(NAME, lambda: self._on_cuda(tensors))
        pool = ThreadPoolExecutor(threads)  # a call through ctypes runs without Python's lock
        bounds = [n * i // threads // 16 * 16 for i in range(threads)] + [n]

        def part(i: int) -> None:
            addresses = [tensor.data_ptr() + 4 * bounds[i] for tensor in tensors]
            self._stream(*addresses, bounds[i + 1] - bounds[i])

        return Contender(NAME, lambda: list(pool.map(part, range(threads))))

    def _on_cuda(self, tensors: list[torch.Tensor]) -> None:
        queue = torch.cuda.current_stream().cuda_stream
        error = self._stream(*(tensor.data_ptr() for tensor in tensors), tensors[0].numel(), queue)
        if error != 0:
            raise RuntimeError(f"stream: the launch returned CUDA error {error}, expected 0")
