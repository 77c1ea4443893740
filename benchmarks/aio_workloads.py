"""The pieces of disk work that the I/O engine is measured with, and what else does them."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.disk_rivals import PlainLoop, fio_fresh_ways, fio_ways
from benchmarks.disk_rows import Bar, Row, Spent, Way, timed
from deepspeed_ext import io
from deepspeed_ext.io._native import native
from deepspeed_ext.io.checkpoint.state_dict import load, save
from deepspeed_ext.io.engine.pinned import PinnedBuffer
from deepspeed_ext.io.tuning.raw_device import PLAIN_THREADS

_IDLE = 3.5  # seconds, in which hypervisors take back what is free
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


@dataclass(frozen=True)
class DiskUnderTest:
    """Where to work, on how much, and the loop to compare with."""

    folder: Path
    scale: float
    plain: PlainLoop

    def scaled(self, count: int, multiple: int = 1) -> int:
        """Return a number of things for this run, a multiple of `multiple`."""
        return max(1, round(count * self.scale / multiple)) * multiple

    def ceiling(
        self, path: Path, write: bool, size: int, memory: Tensor | None = None
    ) -> dict[str, Way]:
        """Return what only reads or overwrites a file: fio in its ways, and the loop.

        Neither is the device alone: fio has one submitter and memory of its own, the loop has
        threads that block. The better one of them counts.

        Args:
            path: of a file that has `size` bytes.
            write: or read.
            size: a multiple of 1 MiB.
            memory: that the loop uses, the same as ours; without one, pinned memory of its own.
        """
        kept = PinnedBuffer(min(size, 64 * MIB)).tensor() if memory is None else memory

        def way() -> Spent:
            args = (kept.data_ptr(), kept.nbytes, size // MIB, MIB, PLAIN_THREADS)
            return self.plain(path, write, *args)

        return fio_ways(path, write, size) | {f"plain loop, {PLAIN_THREADS} threads": way}


def _pinned(engines: list[io.AsyncIO], nbytes: int, huge: bool = True) -> Tensor:
    """Return random bytes in locked memory that the engines have told the kernel about."""
    with contextlib.nullcontext() if huge else _small_pages():
        buffer = PinnedBuffer(nbytes)
    if not buffer.pinned:
        tqdm.write(f"\nmemory is pageable where it should be pinned: {buffer.why_not}")
    for engine in engines:
        engine.register(buffer)
    tensor = buffer.tensor()
    tensor[: nbytes // 8 * 8].view(torch.int64).random_()
    return tensor


@contextlib.contextmanager
def _small_pages() -> Iterator[None]:
    """Keep this process from huge pages, as on machines where they are off."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_huge_pages_off = 41  # PR_SET_THP_DISABLE
    if libc.prctl(set_huge_pages_off, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl cannot turn huge pages off")
    try:
        yield
    finally:
        libc.prctl(set_huge_pages_off, 0, 0, 0, 0)


def _written(disk: DiskUnderTest, tensor: Tensor) -> Path:
    """Return a file with these bytes, on the disk: later writes overwrite."""
    path = disk.folder / "data"
    with io.AsyncIO() as engine:
        engine.write(tensor, path, truncate=True).result()
    _evict(path)
    return path


def _evict(path: Path) -> None:
    """Send a file to the disk and its pages out of memory; once does not always do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        for _ in range(2):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm_memory(nbytes: int) -> None:
    """Touch memory that the next one will get.

    A hypervisor takes free memory back and gives it again at 2 s for a GiB, which would be measured
    instead of the disk; how much of it a way meets depends on who came before.
    """
    for huge in (True, False):
        with contextlib.nullcontext() if huge else _small_pages():
            torch.frombuffer(native().Pages(nbytes), dtype=torch.uint8)[::4096].fill_(1)


def _move(engine: io.AsyncIO, write: bool, tensor: Tensor, file: Any) -> None:
    (engine.write if write else engine.read)(tensor, file).result()


def _doing(write: bool, what: str) -> str:
    return f"{'write' if write else 'read'} {what}"


def large(disk: DiskUnderTest, resources: ExitStack, write: bool) -> Row:
    """One tensor, against fio with the same block and depth, and the loop in the same memory."""
    engine = resources.enter_context(io.AsyncIO())
    size = disk.scaled(GIB, MIB)
    tensor = _pinned([engine], size)
    path = _written(disk, tensor)
    file = native().File(str(path), "update")
    rivals = disk.ceiling(path, write, size, tensor)
    ours = {f"AsyncIO {engine.backend}, pinned": timed(partial(_move, engine, write, tensor, file))}
    title = _doing(write, f"a tensor of {size >> 20} MiB")
    return Row(title, size, ours | rivals, [Bar((tuple(rivals),), 0.95, is_ceiling=True)])


def pageable(disk: DiskUnderTest, resources: ExitStack, write: bool) -> Row:
    """An ordinary tensor at an odd address, against ours in pinned memory."""
    engine = resources.enter_context(io.AsyncIO())
    size = disk.scaled(GIB, MIB)
    pinned = _pinned([engine], size)
    path = _written(disk, pinned)
    file = native().File(str(path), "update")
    ordinary = torch.empty(size + 1, dtype=torch.uint8)[1:].copy_(pinned)
    ways = {
        "AsyncIO, ordinary unaligned tensor": timed(partial(_move, engine, write, ordinary, file)),
        "AsyncIO, pinned": timed(partial(_move, engine, write, pinned, file)),
    }
    title = _doing(write, f"an ordinary tensor of {size >> 20} MiB")
    return Row(title, size, ways, [Bar((("AsyncIO, pinned",),), 0.85)])


def _move_all(engine: io.AsyncIO, write: bool, tensors: list[Tensor], file: Any) -> None:
    """Move tensors to or from places that follow one another, all at once."""
    move, offset = engine.write if write else engine.read, 0
    for tensor in tensors:
        move(tensor, file, offset)
        offset += tensor.nbytes
    engine.wait()


def medium(disk: DiskUnderTest, resources: ExitStack, write: bool) -> Row:
    """Many tensors in flight, against fio in blocks of the better size, and the loop."""
    return _many(disk, resources, write, disk.scaled(256), 4 * MIB)


def small(disk: DiskUnderTest, resources: ExitStack, write: bool) -> Row:
    """Very many small tensors, against a plain loop on one thread."""
    return _many(disk, resources, write, disk.scaled(10_000), 64 * KIB)


def _many(disk: DiskUnderTest, resources: ExitStack, write: bool, count: int, each: int) -> Row:
    engine = resources.enter_context(io.AsyncIO())
    whole = _pinned([engine], count * each)
    path = _written(disk, whole)
    file = native().File(str(path), "update")
    pinned = list(whole.split(each))
    ordinary = [tensor.clone() for tensor in pinned]
    ways: dict[str, Way] = {
        "AsyncIO, pinned": timed(partial(_move_all, engine, write, pinned, file)),
    }
    if each < MIB:
        address = whole.data_ptr()
        loop = partial(disk.plain, path, write, address, whole.nbytes, count, each, 1)
        rivals: dict[str, Way] = {"plain direct loop, one thread": loop}
        times = 2.0
    else:
        rivals = disk.ceiling(path, write, whole.nbytes, whole)
        rivals |= fio_ways(path, write, whole.nbytes, block=each, note=f", {each >> 20} MiB")
        times = 0.90
    # An extra: memory that nobody prepared is copied on its way.
    extra = {"AsyncIO, ordinary": timed(partial(_move_all, engine, write, ordinary, file))}
    title = _doing(write, f"{count:,} tensors of {each >> 10:,} KiB")
    bar = Bar((tuple(rivals),), times, is_ceiling=each >= MIB)
    return Row(title, whole.nbytes, ways | rivals | extra, [bar])


def cpu(disk: DiskUnderTest, resources: ExitStack, huge: bool) -> Row | str:
    """The CPU that reading takes, against the libaio backend; several times, as it is little."""
    engines, times = [], 4
    for backend in ("io_uring", "libaio"):
        try:
            engines.append(resources.enter_context(io.AsyncIO(backend=backend)))
        except OSError as error:
            return f"there is no {backend} here: {error}"
    size = disk.scaled(GIB, MIB)
    tensor = _pinned(engines, size, huge)
    file = native().File(str(_written(disk, tensor)), "read")
    names = ("AsyncIO io_uring, registered", "AsyncIO libaio")

    def reads(engine: io.AsyncIO) -> None:
        for _ in range(times):
            _move(engine, False, tensor, file)

    ways = {n: timed(partial(reads, engine)) for n, engine in zip(names, engines, strict=True)}
    pages = "huge" if huge else "small"
    title = f"read {size >> 20} MiB {times} times into {pages} pages: seconds of the CPU for a GiB"
    return Row(title, size * times, ways, [Bar((names[1:],), 0.7, of_cpu=True)])


def _state_dict(disk: DiskUnderTest) -> dict[str, Tensor]:
    """Return a state dict as of a model: big matrices, small vectors."""
    rows = disk.scaled(2048)
    made = {}
    for layer in range(32):
        made[f"layers.{layer}.weight"] = torch.randn(rows, 8192)
        made[f"layers.{layer}.bias"] = torch.randn(8192)
    return made


def _size_of(state: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def state_save(disk: DiskUnderTest, resources: ExitStack) -> Row:
    """A state dict into a fresh file, on the disk in the end."""
    state = _state_dict(disk)
    size = _size_of(state)
    path = disk.folder / "state"

    def fresh(work: Callable[[], None]) -> Spent:
        path.unlink(missing_ok=True)
        return timed(work)()

    def save_ours() -> None:
        save(state, path)

    def save_torch(checksums: bool) -> None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(checksums)
        torch.save(state, path)
        torch.serialization.set_crc32_options(before)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    rivals = fio_fresh_ways(disk.folder / "fio", size // MIB * MIB)
    ways: dict[str, Way] = {"io.save": partial(fresh, save_ours), **rivals}
    torchs = ("torch.save + fsync", "torch.save + fsync, no CRC-32")
    for name, checksums in zip(torchs, (True, False), strict=True):
        ways[name] = partial(fresh, partial(save_torch, checksums))
    bars = [Bar((tuple(rivals),), 0.90), *(Bar(((name,),), 3.0) for name in torchs)]
    return Row(f"save a state dict of {size >> 20} MiB durably into a fresh file", size, ways, bars)


def state_load(disk: DiskUnderTest, resources: ExitStack) -> Row:
    """A state dict from the disk, nothing of it in memory."""
    state = _state_dict(disk)
    size = _size_of(state)
    ours, torchs = disk.folder / "ours", disk.folder / "torchs"
    save(state, ours)
    torch.save(state, torchs)
    name, loaded = next(iter(state)), load(ours)
    if not torch.equal(state[name], loaded[name]):
        raise RuntimeError("io.load returned other bytes than io.save was given")
    del state, loaded

    def cold(path: Path, work: Callable[[], object]) -> Spent:
        _evict(path)
        _warm_memory(2 * size)
        return timed(work)()

    rivals = disk.ceiling(ours, False, size // MIB * MIB)
    ways: dict[str, Way] = {"io.load": partial(cold, ours, partial(load, ours)), **rivals}
    ways["torch.load"] = partial(cold, torchs, partial(torch.load, torchs, weights_only=True))
    bars = [Bar((tuple(rivals),), 0.90, is_ceiling=True), Bar((("torch.load",),), 3.0)]
    return Row(f"load a state dict of {size >> 20} MiB", size, ways, bars)


def state_touch(
    disk: DiskUnderTest, resources: ExitStack, cold: bool = True, fresh: bool = False
) -> Row:
    """A state dict whose bytes are all used, against mapping the file.

    Cached ones are for information; fresh memory is what a process finds on a machine that was
    idle, with what a hypervisor may have taken back.
    """
    state = {f"layers.{i}": torch.randn(disk.scaled(2048), 8192) for i in range(16)}
    size, path, torchs = _size_of(state), disk.folder / "ours", disk.folder / "torchs"
    save(state, path)
    torch.save(state, torchs)
    del state

    def way(file: Path, read: Callable[[Path], dict[str, Tensor]]) -> Spent:
        if cold:
            _evict(file)
        else:
            file.read_bytes()
        if fresh:
            time.sleep(_IDLE)
        else:
            _warm_memory(2 * size)
        return timed(lambda: [t.view(torch.int64).sum() for t in read(file).values()])()

    def mapped(file: Path) -> dict[str, Tensor]:
        loaded: dict[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
        return loaded

    name = "torch.load(mmap=True)"
    ways = {"io.load": partial(way, path, load), name: partial(way, torchs, mapped)}
    memory, cached = "fresh" if fresh else "warm", "nothing" if cold else "all"
    title = f"load {size >> 20} MiB into {memory} memory and sum them, {cached} cached"
    return Row(title, size, ways, [Bar(((name,),), 1.05)] if cold else [])


def cuda(disk: DiskUnderTest, resources: ExitStack, write: bool) -> Row | str:
    """A tensor of the GPU, against the same bytes from host memory, and against the link."""
    if not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    size = disk.scaled(8 * GIB, MIB)
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    tensor[: size // 8 * 8].view(torch.int64).random_()
    path = _written(disk, tensor)
    engine = resources.enter_context(io.AsyncIO())
    file = native().File(str(path), "update")
    host = torch.empty(min(size, 256 * MIB), dtype=torch.uint8, pin_memory=True)

    def link() -> None:
        for part in tensor.split(host.nbytes):
            there = host[: part.nbytes]
            (there if write else part).copy_(part if write else there, non_blocking=True)
        torch.cuda.synchronize()

    def ours() -> None:
        _move(engine, write, tensor, file)
        torch.cuda.synchronize()

    ceiling = disk.ceiling(path, write, size)
    ways = {"AsyncIO, CUDA tensor": timed(ours), **ceiling, "copies over the link": timed(link)}
    bar = Bar((tuple(ceiling), ("copies over the link",)), 0.90)
    return Row(_doing(write, f"a CUDA tensor of {size >> 20} MiB"), size, ways, [bar])


DiskWorkload = Callable[[DiskUnderTest, ExitStack], Row | str]

WORKLOADS: dict[str, DiskWorkload] = {
    "large-read": partial(large, write=False),
    "large-write": partial(large, write=True),
    "pageable-read": partial(pageable, write=False),
    "pageable-write": partial(pageable, write=True),
    "medium-read": partial(medium, write=False),
    "medium-write": partial(medium, write=True),
    "small-read": partial(small, write=False),
    "small-write": partial(small, write=True),
    "cpu": partial(cpu, huge=False),
    "cpu-huge": partial(cpu, huge=True),
    "state-save": state_save,
    "state-load": state_load,
    "state-touch": state_touch,
    "state-touch-fresh": partial(state_touch, fresh=True),
    "state-touch-cached": partial(state_touch, cold=False),
    "cuda-write": partial(cuda, write=True),
    "cuda-read": partial(cuda, write=False),
}
