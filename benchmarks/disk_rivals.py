"""What the I/O engine is measured against: fio, by its own account, and a plain loop in C++."""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.disk_rows import Spent, Way
from deepspeed_ext.op_builder import OpSpec
from deepspeed_ext.op_builder.compile import compile_library
from deepspeed_ext.op_builder.wanted import Wanted

FIO = shutil.which("fio")
_ENGINES = {
    "fio io_uring": ("--ioengine=io_uring",),
    "fio io_uring fixed": ("--ioengine=io_uring", "--fixedbufs=1"),
    "fio libaio": ("--ioengine=libaio",),
}


def fio_version() -> str:
    if FIO is None:
        return "not on this machine: compared with plain threads instead"
    return subprocess.run([FIO, "--version"], check=True, capture_output=True, text=True).stdout


def fio_ways(
    path: Path, write: bool, size: int, block: int = 1 << 20, depth: int = 32, note: str = ""
) -> dict[str, Way]:
    """Return fio's ways to read or overwrite a file that is there, all of it once."""
    return {
        name + note: partial(fio, path, write, size, block, depth, options)
        for name, options in _engines(path.parent, block, depth).items()
    }


def fio_fresh_ways(path: Path, size: int) -> dict[str, Way]:
    """Return fio's ways to write a new file, which is on the disk in the end."""

    def way(options: Iterable[str]) -> Spent:
        path.unlink(missing_ok=True)
        fresh = ("--end_fsync=1", "--fallocate=native")
        spent = fio(path, True, size, 1 << 20, 32, (*options, *fresh))
        path.unlink()
        return spent

    engines = _engines(path.parent, 1 << 20, 32)
    return {f"{name} + fsync": partial(way, options) for name, options in engines.items()}


def _engines(folder: Path, block: int, depth: int) -> dict[str, tuple[str, ...]]:
    """Return fio's engines that work here, for instance within the limit of locked memory."""
    found = {}
    for name, options in _ENGINES.items() if FIO else ():
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            try:
                fio(Path(file.name), True, block, block, depth, options)
                found[name] = options
            except RuntimeError as error:
                tqdm.write(f"\nwithout {name}: {' '.join(str(error).split())[-200:]}")
    return found


def fio(
    path: Path, write: bool, size: int, block: int, depth: int, options: Iterable[str]
) -> Spent:
    """Run fio once; return the seconds of its own bandwidth."""
    direction = "write" if write else "read"
    command = [
        *(str(FIO), "--output-format=json", "--thread", "--name=work", f"--rw={direction}"),
        *("--direct=1", f"--filename={path}", f"--size={size}", f"--bs={block}"),
        *(f"--iodepth={depth}", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
    if found["io_bytes"] != size:
        raise RuntimeError(f"fio moved {found['io_bytes']} bytes, expected {size}")
    return Spent(found["io_bytes"] / found["bw_bytes"])


class PlainLoop:
    """Direct reads or writes of equal pieces, in C++."""

    def __init__(self) -> None:
        spec = OpSpec("plain_io", "cpu", ("plain_io.cpp",), needs=(), links=("pthread",))
        with tempfile.TemporaryDirectory() as folder:
            library = compile_library(Wanted.of(spec, Path(__file__).parent), Path(folder))
            self._run = ctypes.CDLL(str(library)).plain_io
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._run.argtypes = [ctypes.c_char_p, integer, pointer, size, size, size, integer]
        self._run.restype = ctypes.c_double

    def __call__(
        self,
        path: Path,
        write: bool,
        address: int,
        nbytes: int,
        count: int,
        each: int,
        threads: int,
    ) -> Spent:
        """Move `count` pieces of `each` bytes; return the seconds.

        Args:
            path: of a file that has them.
            write: or read.
            address: of memory, aligned for direct I/O.
            nbytes: how much of it there is; it is used again from its start.
            count: how many pieces.
            each: bytes of each.
            threads: how many take turns.
        """
        name = os.fsencode(path)
        seconds: float = self._run(name, write, address, nbytes, count, each, threads)
        if seconds < 0:
            raise OSError(-int(seconds), f"plain I/O: {os.strerror(-int(seconds))}", str(path))
        return Spent(seconds)
