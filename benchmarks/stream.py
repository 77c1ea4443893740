"""The ceilings of memory: compiled loops that move what an optimizer step does, or only read."""

import ctypes
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from benchmarks.harness import Contender
from deepspeed_ext.op_builder import OpSpec
from deepspeed_ext.op_builder.compile import compile_library
from deepspeed_ext.op_builder.wanted import Wanted

NAME = "stream of 4 reads, 3 writes"
READ = "read, and nothing else"
_BYTES = 28  # of one float in each of seven passes


class Stream:
    """Compiled loops that move a number of bytes, through tensors of their own."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        spec = OpSpec(
            name="stream",
            device=device,
            sources=("stream.cu" if device == "cuda" else "stream.cpp",),
            needs=("cuda",) if device == "cuda" else (),
        )
        with tempfile.TemporaryDirectory() as folder:
            library = compile_library(Wanted.of(spec, Path(__file__).parent), Path(folder))
            loaded = ctypes.CDLL(str(library))
        self._stream, self._read = loaded.stream, loaded.read_all
        pointers = [ctypes.c_void_p] * (5 if device == "cuda" else 4)
        self._stream.argtypes = [*pointers[:4], ctypes.c_int64, *pointers[4:]]
        self._stream.restype = ctypes.c_int if device == "cuda" else None
        sinks = [ctypes.c_void_p] * (2 if device == "cuda" else 0)
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, *sinks]
        self._read.restype = ctypes.c_int if device == "cuda" else ctypes.c_uint64
        self._sink = torch.zeros(1, dtype=torch.int32, device=device)

    def contender(self, bytes_moved: int, threads: int) -> Contender:
        """Return the loop over as many bytes as the work that it is the ceiling of."""
        n = bytes_moved // _BYTES // 4 * 4
        tensors = [torch.rand(n, device=self.device) for _ in range(4)]
        if self.device == "cuda":
            addresses = [tensor.data_ptr() for tensor in tensors]
            return Contender(
                NAME,
                lambda _kept=tensors: self._on_cuda(self._stream, *addresses, n),
                is_ceiling=True,
            )

        def part(begin: int, end: int) -> None:
            self._stream(*(tensor.data_ptr() + 4 * begin for tensor in tensors), end - begin)

        return Contender(NAME, _in_parts(part, n, threads), is_ceiling=True)

    def read_contender(self, bytes_read: int, threads: int) -> Contender:
        """Return a loop that reads as many bytes as the work that it is the ceiling of."""
        n = bytes_read // 16
        words = torch.ones(n, 2, dtype=torch.int64, device=self.device)
        if self.device == "cuda":
            return Contender(READ, lambda: self.read(words), is_ceiling=True)

        def part(begin: int, end: int) -> None:
            self._read(words.data_ptr() + 16 * begin, 2 * (end - begin))

        return Contender(READ, _in_parts(part, n, threads), is_ceiling=True)

    def read(self, tensor: torch.Tensor) -> None:
        """Queue, on CUDA, that all of a tensor is read and nothing else is done."""
        n = tensor.nbytes // 16
        self._on_cuda(self._read, tensor.data_ptr(), n, self._sink.data_ptr())

    def _on_cuda(self, launch: Callable[..., int], *arguments: int) -> None:
        error = launch(*arguments, torch.cuda.current_stream().cuda_stream)
        if error != 0:
            raise RuntimeError(f"stream: the launch returned CUDA error {error}, expected 0")


def _in_parts(part: Callable[[int, int], None], n: int, threads: int) -> Callable[[], object]:
    """Return a call of part(begin, end) for each thread; one through ctypes runs without a lock."""
    pool = ThreadPoolExecutor(threads)
    bounds = [n * i // threads // 16 * 16 for i in range(threads)] + [n]
    return lambda: list(pool.map(part, bounds, bounds[1:]))
