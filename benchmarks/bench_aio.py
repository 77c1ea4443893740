"""The I/O engine beside fio, plain loops and torch.save: `python -m benchmarks.bench_aio`.

CPU is the seconds of the CPU that this process takes for a GiB. Rates of fio are what fio says;
with "fixed" it registers its buffers, as ours does. What a disk can do is the better one of fio at
its best and of a plain loop of threads in the memory that ours uses; all take turns on one file.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from benchmarks.aio_workloads import WORKLOADS, DiskUnderTest
from benchmarks.disk_rivals import PlainLoop, fio_version
from benchmarks.disk_rows import measure
from benchmarks.harness import ROUNDS
from benchmarks.results import Result, add_option, introduced, keep, show
from deepspeed_ext.io._native import native
from deepspeed_ext.io.tuning.settings import device_of


def _described(path: Path, scale: float) -> dict[str, str]:
    device = device_of(path)
    probed = native().probe_backends()
    direct = native().File.scratch(str(path)).direct
    return {
        "file system": device.file_system,
        "backends": ", ".join(name for name, code in probed.items() if code == 0),
        "direct I/O": "yes" if direct else "no: all goes through the page cache",
        "fio": fio_version().strip(),
        "scale": f"{scale:g} of the full sizes",
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a folder on the disk")
    parser.add_argument(
        "--rows",
        default=",".join(WORKLOADS),
        help=f"such as large,cpu; all are {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes, such as 0.1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_option(parser)
    options = parser.parse_args(arguments)
    wanted = options.rows.split(",")
    unknown = [word for word in wanted if not any(name.startswith(word) for name in WORKLOADS)]
    if unknown:
        parser.error(f"rows are {unknown}, expected some of {', '.join(WORKLOADS)}")
    if device_of(options.path).file_system in ("tmpfs", "ramfs"):
        parser.error(f"path {options.path} is in memory, expected a folder on a disk")
    described = introduced("cpu", **_described(options.path, options.scale))
    chosen = [name for name in WORKLOADS if name.startswith(tuple(wanted))]
    results: list[Result] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bench-aio-", dir=options.path) as folder,
            tqdm(total=len(chosen) * options.rounds, desc="rounds", disable=None) as progress,
        ):
            disk = DiskUnderTest(Path(folder), options.scale, PlainLoop())
            for name in chosen:
                with ExitStack() as resources:
                    row = WORKLOADS[name](disk, resources)
                    if isinstance(row, str):
                        tqdm.write(f"\n{name}: skipped, {row}")
                        progress.update(options.rounds)
                        continue
                    results.append(measure(name, row, options.rounds, progress))
                show(results[-1])
                for file in Path(folder).iterdir():
                    file.unlink()
    finally:  # what is measured is kept, whatever fails after it
        keep(options.save, results, described)
    return 0


if __name__ == "__main__":
    sys.exit(main())
