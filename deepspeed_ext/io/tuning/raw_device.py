"""How fast a file is without this engine: with fio, where there is one, and in a plain loop.

What is measured here is what the engine's own figures are held against. fio has one submitter,
which does not always reach what a device can do; threads that only read and write come nearer.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable

from deepspeed_ext.io.tuning.rates import Rates

PLAIN_THREADS = 16
MOST_ACHIEVED = 1.05  # of these rates: more than that says that something else was measured

_BLOCK = 1 << 20
_DEPTH = 32
_DIRECTIONS = ("read", "write")
_FIO_WAYS = {  # fixed buffers are the best, but locked memory may be short
    "fio io_uring": ("--ioengine=io_uring", "--fixedbufs=1"),
    "fio io_uring, not fixed": ("--ioengine=io_uring",),
    "fio libaio": ("--ioengine=libaio",),
}

Measure = Callable[[float], Rates]  # takes the seconds for each direction


def ways_to_measure(descriptor: int, size: int, memory: memoryview) -> dict[str, Measure]:
    """Return what can measure an open file here, by name; none where direct I/O is impossible.

    Args:
        descriptor: of the file, open for reading and writing.
        size: its length in bytes, a multiple of 1 MiB.
        memory: what the plain loop uses, whole pages, a multiple of 1 MiB.
    """
    path = f"/proc/{os.getpid()}/fd/{descriptor}"  # works for files without a name, too
    if not _is_direct(path):
        return {}
    ways: dict[str, Measure] = {}
    program = shutil.which("fio")
    for name, options in _FIO_WAYS.items() if program else ():

        def with_fio(seconds: float, options: tuple[str, ...] = options) -> Rates:
            return _fio([str(program)], options, path, size, seconds)

        try:
            with_fio(0.01)
        except OSError:  # this kernel or container has not got it
            continue
        ways[name] = with_fio
    ways[f"{PLAIN_THREADS} plain threads"] = lambda seconds: Rates(
        _plain(path, size, memory, seconds, write=False),
        _plain(path, size, memory, seconds, write=True),
    )
    return ways


def _is_direct(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _fio(
    program: list[str], options: tuple[str, ...], path: str, size: int, seconds: float
) -> Rates:
    """Read, then write for that long each; what fio itself says it reached."""
    command = [
        *program,
        *("--output-format=json", "--thread", "--direct=1", "--allow_file_create=0"),
        *(f"--filename={path}", f"--size={size}", *options),
        *(f"--bs={_BLOCK}", f"--iodepth={_DEPTH}"),
        *("--time_based", f"--runtime={max(1, round(1e3 * seconds))}ms"),
        *("--name=read", "--rw=read", "--stonewall", "--name=write", "--rw=write"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        if done.returncode == 0:
            return Rates(*(float(jobs[i][name]["bw_bytes"]) for i, name in enumerate(_DIRECTIONS)))
    except (ValueError, LookupError):
        pass
    said = " ".join((done.stderr or done.stdout).split())[:200]
    raise OSError(f"fio with {' '.join(options)} ended with status {done.returncode}: {said}")


def _plain(path: str, size: int, memory: memoryview, seconds: float, *, write: bool) -> float:
    """Let several threads read or write one piece after the other; return bytes per second."""
    lock, next_piece = threading.Lock(), iter(range(1 << 60))
    moved = [0] * PLAIN_THREADS
    failed: list[OSError] = []
    started = time.perf_counter()

    def work(index: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            failed.append(error)
            return
        try:
            while time.perf_counter() - started < seconds and not failed:
                with lock:
                    offset = next(next_piece) * _BLOCK
                start = offset % memory.nbytes
                call = os.pwritev if write else os.preadv
                piece = memory[start : start + _BLOCK]
                moved[index] += call(descriptor, [piece], offset % size)
        except OSError as error:
            failed.append(error)
        finally:
            os.close(descriptor)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(PLAIN_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(moved) / (time.perf_counter() - started)
