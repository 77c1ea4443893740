"""Importing a folder of DeepSpeed's: `python -m benchmarks.bench_import --size 3`, billions.

Makes a folder as DeepSpeed's save_checkpoint does, and imports it, by turns with a copy of as many
bytes: all files are read, and written as one, by this package's I/O engine, and by read and write.
Each begins with no page of the files in memory, and ends when all is on the disk. Printed are the
seconds, and the memory of the process that imports, beside pages of files. It needs 14 bytes of the
disk for each parameter, and 14 more while it runs.
"""

import argparse
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from deepspeed_ext import zero
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.new_file import NewFile

WIDTH = 4096
VOCABULARY = 50_000  # rows of the largest parameter
_PIECE_BYTES = 32 << 20
_DEPTH = 4
_KEYS = ("exp_avg", "exp_avg_sq")


def shapes_of(size: float) -> dict[str, torch.Size]:
    """Return an embedding, and matrices and vectors until there are enough parameters."""
    found = {"embedding": torch.Size((VOCABULARY, WIDTH))}
    total = VOCABULARY * WIDTH
    while total < size * 1e9:
        number = len(found)
        found[f"layers.{number}.weight"] = torch.Size((WIDTH, WIDTH))
        found[f"layers.{number}.bias"] = torch.Size((WIDTH,))
        total += WIDTH * WIDTH + WIDTH
    return found


def write(home: Path, shapes: dict[str, torch.Size], processes: int) -> None:
    """Write what a run of stage 2 in bfloat16 leaves, a file at a time in memory."""
    folder = home / "global_step1"
    if (home / "latest").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(shape.numel() for shape in shapes.values())
    size = -(-total // (2 * processes)) * 2
    module = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    common = {"global_steps": 1, "dp_world_size": processes, "ds_version": "0.19.8"}
    model = {"module": module, "param_shapes": [shapes], **common}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    del module, model
    for rank in tqdm(range(processes), desc="writing", disable=None):
        state = {key: torch.rand(size) for key in _KEYS}
        group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
        inside = {
            "zero_stage": 2,
            "partition_count": [processes],
            "single_partition_of_fp32_groups": [torch.full((min(size, total - rank * size),), 0.5)],
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(1.0), **state}},
                "param_groups": [group],
            },
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": inside, "ds_version": "0.19.8"}, folder / name)
    (home / "latest").write_text("global_step1")


def forget(folder: Path) -> None:
    """Give the pages of the files back, so that they are read from the disk."""
    for file in folder.rglob("*.pt"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def pieces_of(folder: Path) -> Iterator[tuple[Path, int, int]]:
    for file in sorted(folder.rglob("*.pt")):
        total = file.stat().st_size
        for offset in range(0, total, _PIECE_BYTES):
            yield file, offset, min(_PIECE_BYTES, total - offset)


def by_engine(folder: Path, out: Path) -> None:
    """Copy by requests that are under way together."""
    memory = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(_DEPTH)]
    pieces, position = list(pieces_of(folder)), 0
    with AsyncIO(threads=2) as engine, NewFile(out / "copy") as new:
        new.reserve(sum(nbytes for _, _, nbytes in pieces))
        reads: list[tuple[object, torch.Tensor]] = []
        writes: list[object] = [None] * _DEPTH
        for number, (file, offset, nbytes) in enumerate(pieces):
            slot = number % _DEPTH
            if writes[slot] is not None:
                writes[slot].result()  # type: ignore[attr-defined]
            part = memory[slot][:nbytes]
            reads.append((engine.read(part, file, offset), part))
            if len(reads) == _DEPTH // 2 or number == len(pieces) - 1:
                for i, (future, read) in enumerate(reads, number + 1 - len(reads)):
                    future.result()  # type: ignore[attr-defined]
                    writes[i % _DEPTH] = engine.write(read, new.file, position)
                    position += read.numel()
                reads = []
        for each in filter(None, writes):
            each.result()  # type: ignore[attr-defined]
        new.publish()


def by_calls(folder: Path, out: Path) -> None:
    """Copy by read and write, as cp does."""
    memory = memoryview(bytearray(8 << 20))
    with open(out / "copy", "wb", buffering=0) as new:
        for file in sorted(folder.rglob("*.pt")):
            with open(file, "rb", buffering=0) as old:
                while count := old.readinto(memory):
                    new.write(memory[:count])
        os.fsync(new.fileno())


def imported(folder: Path, out: Path) -> None:
    zero.import_deepspeed(folder, out)


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "import": imported,
    "copy, I/O engine": by_engine,
    "copy, read and write": by_calls,
}


def measured(run: Callable[[Path, Path], None], folder: Path, out: Path) -> tuple[float, int]:
    """Return the seconds of a call in a process of its own, and the most private memory it had."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    forget(folder)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_timed, args=(theirs, run, folder, out))
    process.start()
    before = mine.recv()
    most = 0
    while not mine.poll(0.05):
        most = max(most, _private(process.pid or 0))
    seconds: float = mine.recv()
    process.join()
    shutil.rmtree(out)
    return seconds, max(0, most - before)


def _timed(pipe, run, folder: Path, out: Path) -> None:  # type: ignore[no-untyped-def]
    with AsyncIO():  # what is compiled or loaded once
        pass
    pipe.send(_private(os.getpid()))
    begin = time.perf_counter()
    run(folder, out)
    pipe.send(time.perf_counter() - begin)


def _private(process: int) -> int:
    """Return the bytes of a process that are no pages of files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return sum(int(found[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem") if key in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=3.0, help="1e9 parameters; default: 3")
    parser.add_argument("--processes", type=int, default=8, help="that have written; default: 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_import"))
    add_option(parser)
    options = parser.parse_args()
    environment = introduced("cpu")
    theirs, out = options.folder / f"{options.size:g}-{options.processes}", options.folder / "out"
    write(theirs, shapes_of(options.size), options.processes)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    most = 0
    for _ in tqdm(range(options.rounds), disable=None):
        for name, run in CONTENDERS.items():
            found, memory = measured(run, theirs, out)
            seconds[name].append(found)
            most = max(most, memory) if name == "import" else most
    total = sum(file.stat().st_size for file in theirs.rglob("*.pt"))
    result = Result(
        f"import of {options.size:g} B parameters, {options.processes} processes",
        0,
        0,
        total,
        {name: Timing.of(listed) for name, listed in seconds.items()},
        ceilings=list(CONTENDERS)[1:],
        notes=[f"the import has {most / 2**20:,.0f} MiB of memory beside pages of files"],
    )
    show(result)
    keep(options.save, [result], environment)


if __name__ == "__main__":
    main()
