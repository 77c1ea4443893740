"""The command line: python -m deepspeed_ext.io tune PATH."""

import argparse
import errno
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.io.engine.arguments import Settings
from deepspeed_ext.io.tuning.rates import Rates
from deepspeed_ext.io.tuning.settings import save
from deepspeed_ext.io.tuning.tune import Report, tune
from deepspeed_ext.op_builder import BuildError, program

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _bytes(text: str) -> int:
    """Read a size such as 512M or 1GiB."""
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = _SIZES.get(number[-1:], 1)
    try:
        return int(float(number.rstrip("KMGT")) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected one such as 1G") from None


def _shown(count: int) -> str:
    """Write a size such as 1 MiB."""
    unit = min(3, int(math.log2(max(count, 1))) // 10)
    return f"{count / (1 << 10 * unit):.4g} {('bytes', 'KiB', 'MiB', 'GiB')[unit]}"


def _table(path: str, report: Report) -> Iterator[str]:
    """Yield the lines of what was found, for 80 columns."""
    device = report.device
    yield f"{path} on {device.source} ({device.file_system})"
    how = "direct I/O" if report.direct else "no direct I/O: through the page cache"
    yield f"test file of {_shown(report.file_bytes)}, {how}"
    for backend, code in report.refused.items():
        name = errno.errorcode.get(code, str(code))
        yield f"{backend} does not work here: {name} ({os.strerror(code)})"
    yield ""
    head = f"{'backend':12}{'block size':>11}{'depth':>7}{'threads':>9}"
    yield f"{head}{'read GB/s':>11}{'write GB/s':>12}"
    for settings, rates in report.finalists.items():
        yield _row(settings, rates) + ("  <- best" if settings == report.best else "")
    for name, rates in report.raw.items():
        yield f"{'raw device: ' + name:39}{_figures(rates)}"
    yield ""
    if report.achieved is None:
        yield "the raw device cannot be measured without direct I/O"
    else:
        read, write = report.achieved.read, report.achieved.write
        yield f"achieved {read:.0%} of the raw device when reading, {write:.0%} when writing"
        if not report.trusted:
            yield "more than 105% cannot be trusted: measure again when the device is idle"


def _row(settings: Settings, rates: Rates) -> str:
    shown = f"{settings.backend:12}{_shown(settings.block_size):>11}"
    return f"{shown}{settings.queue_depth:>7}{settings.threads:>9}{_figures(rates)}"


def _figures(rates: Rates) -> str:
    return f"{rates.read / 1e9:>11.2f}{rates.write / 1e9:>12.2f}"


def _record(report: Report) -> dict[str, object]:
    """Return the report for machines; rates are in bytes per second."""
    achieved = report.achieved
    return {
        **{name: getattr(report, name) for name in ("direct", "file_bytes", "refused")},
        "device": asdict(report.device),
        "best": asdict(report.best),
        "finalists": [asdict(s) | asdict(rates) for s, rates in report.finalists.items()],
        "raw": {name: asdict(rates) for name, rates in report.raw.items()},
        "achieved": asdict(achieved) if achieved else None,
        "trusted": report.trusted,
    }


def _tune(options: argparse.Namespace) -> None:
    shape = "{desc} {bar} {percentage:3.0f}%"
    with tqdm(total=1, desc="trying", disable=None, leave=False, bar_format=shape) as bar:

        def progress(part: float) -> None:
            bar.update(part - bar.n)

        report = tune(options.path, options.seconds, options.size, progress)
    best = report.finalists[report.best]
    file = None if options.dry_run else save(options.path, report.best, measured=asdict(best))
    if options.json:
        print(json.dumps(_record(report) | {"saved": file and str(file)}, indent=1))
        return
    print("\n".join(_table(options.path, report)))
    if file is not None:
        print(f"saved in {file}\nuse it with: AsyncIO(**io.tuned({options.path!r}))")


@program
def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_ext.io", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "find the settings that suit a device, and save them for io.tuned and ds_report"
    command = commands.add_parser("tune", help=text, description=f"{text.capitalize()}.")
    command.add_argument("path", metavar="PATH", help="a folder on the device")
    command.add_argument("--seconds", type=float, default=20.0, help="how long it may take (20)")
    command.add_argument(
        "--size", type=_bytes, default=1 << 30, help="of the test file (1G; less on a full disk)"
    )
    command.add_argument("--dry-run", action="store_true", help="save nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        _tune(options)
    except BrokenPipeError:
        raise
    except (BuildError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was saved", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
