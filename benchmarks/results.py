"""What was measured: as a table on the terminal, and kept as JSON, a file for each machine.

`--save` of every benchmark puts its rows into `benchmarks/results/<machine>.json`, in the place of
earlier rows of the same work; `python -m benchmarks.tables` makes the tables of docs from them.
A file holds the machine's `name`, as the tables call it, and a list of `runs`:

    command      what was run
    date         when
    commit       of the working copy; "+" at its end: with changes
    environment  processor, GPU, versions, and what else the figures depend on
    transcribed  true if the figures come from the README of that commit, from before such files
                 were kept: they are rounded, and some are known as ratios only
    rows         a list of pieces of work:
        bench       the part of the command's name after `bench_`
        work        what is done; with bench and threads it tells rows apart
        title       how a table calls it, if otherwise
        threads     of the CPU; 0 on CUDA, and where there is no choice
        elements    how many there are; 0 where that says nothing
        bytes       that are moved
        contenders  by name, ours first: median, least and most of the seconds that all rounds
                    took, and `cpu`, the median of this process's seconds on the CPU, if measured
        times       by name: how many times as fast as that contender ours is, by the medians
        ceilings    names of those contenders that only move as many bytes
        rounds      that were measured, if the run was interrupted before all of them
        remark      what else there is to know
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import deepspeed_ext

FOLDER = Path(__file__).parent / "results"
_NO_DIGITS = 5  # significant ones that are kept


@dataclass(frozen=True)
class Timing:
    """The seconds that all rounds of a contender took."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        return Timing(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Result:
    """One piece of work, done by all contenders; the first is ours.

    Args:
        work: what tells it from others of its benchmark.
        threads: of the CPU, 0 on CUDA.
        elements: 0 where that says nothing.
        bytes_moved: 0 where that says nothing.
        timings: by contender.
        ceilings: names of contenders that only move as many bytes.
        cpu: seconds of this process on the CPU, by contender, where they were measured.
        title: what is printed, if not `work`.
        notes: lines to print below.
        only: how many rounds there were, if the run was interrupted; 0 if it was not.
    """

    work: str
    threads: int
    elements: int
    bytes_moved: int
    timings: Mapping[str, Timing]
    ceilings: Sequence[str] = ()
    cpu: Mapping[str, Timing] = field(default_factory=dict)
    title: str = ""
    notes: Sequence[str] = ()
    only: int = 0

    @property
    def times(self) -> dict[str, float]:
        """How many times as fast as each other contender ours is."""
        ours, *others = self.timings.items()
        return {name: timing.median / ours[1].median for name, timing in others}


def introduced(device: str, **more: str) -> dict[str, str]:
    """Print what the figures depend on, `more` included, and return it."""
    described = _environment(device) | more
    print("\n".join(f"{name:14} {text}" for name, text in described.items()), flush=True)
    return described


def _environment(device: str) -> dict[str, str]:
    found = {"processor": _processor(), "cores": str(len(os.sched_getaffinity(0)))}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "deepspeed_ext": deepspeed_ext.__version__,
    }


def _processor() -> str:
    """Return the processor's name, with its numbers: virtual machines give many the same name."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found['cpu family']} model {found['model']}"


def show(result: Result) -> None:
    """Print one piece of work as a table; tqdm's bar stays below it."""
    moved, elements = result.bytes_moved, result.elements
    threads = f", {result.threads} thread{'s' * (result.threads > 1)}" * bool(result.threads)
    lines = [f"\n{result.title or result.work}{threads}"]
    if elements:
        lines.append(f"{elements:,} elements, {moved / elements:g} bytes each")
    heads = f"{'GB/s':>8}{'ours is':>9}" + f"{'CPU s/GiB':>11}" * bool(result.cpu)
    width = max(33, *(len(name) + 1 for name in result.timings))
    lines.append(f"{'':{width}}{'ms':>9}  {'least .. most':^19}{heads if moved else ''}".rstrip())
    for name, timing in result.timings.items():
        spread = f"{1e3 * timing.least:.3f} .. {1e3 * timing.most:.3f}"
        line = f"{name:{width}}{1e3 * timing.median:9.3f}  {spread:^19}"
        if moved:
            ratio = f"{result.times[name]:.2f}x" if name in result.times else ""
            line += f"{moved / timing.median / 1e9:8.2f}{ratio:>9}"
        if name in result.cpu:
            line += f"{result.cpu[name].median / (moved / 2**30):11.3f}"
        lines.append(line.rstrip())
    tqdm.write("\n".join([*lines, *(f"  {note}" for note in result.notes)]))


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark its option --save."""
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=FOLDER,
        metavar="PATH",
        help="keep the results in this file or in this machine's file in this folder, by default"
        f" {FOLDER.parent.name}/{FOLDER.name}",
    )


def keep(path: Path | None, results: Sequence[Result], described: Mapping[str, str]) -> None:
    """Put rows into a machine's file, in the place of what it has of the same work.

    Args:
        path: the file, or the folder that it is in; both are made. None keeps nothing.
        results: the rows; if there is none, nothing is kept.
        described: what they depend on.
    """
    if path is None or not results:
        return
    machine = described.get("gpu") or described["processor"]
    if path.suffix != ".json":
        path = path / f"{re.sub('[^a-z0-9]+', '-', machine.lower())}.json"
    record = json.loads(path.read_text()) if path.exists() else {"name": machine, "runs": []}
    module = sys.modules["__main__"].__spec__
    bench = module.name if module else Path(sys.argv[0]).stem
    rows = [row_of(bench.rpartition("bench_")[2], result) for result in results]
    run = {
        "command": f"python -m {bench} {shlex.join(_without_save(sys.argv[1:]))}".strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "environment": dict(described),
    }
    record["runs"] = merged(record["runs"], run | {"rows": rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(record))
    print(f"kept in {path}")


def row_of(bench: str, result: Result) -> dict[str, Any]:
    """Return a result as it is kept."""
    contenders: dict[str, dict[str, float]] = {}
    for name, timing in result.timings.items():
        seconds = {"median": timing.median, "least": timing.least, "most": timing.most}
        if name in result.cpu:
            seconds["cpu"] = result.cpu[name].median
        contenders[name] = {key: _rounded(value) for key, value in seconds.items()}
    titled = {"title": result.title} if result.title else {}
    return {
        "bench": bench,
        "work": result.work,
        **titled,
        "threads": result.threads,
        "elements": result.elements,
        "bytes": result.bytes_moved,
        "contenders": contenders,
        "times": {name: _rounded(value) for name, value in result.times.items()},
        "ceilings": list(result.ceilings),
        **({"rounds": result.only} if result.only else {}),
    }


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return what tells a row from the others of its machine."""
    return row["bench"], row["work"], row["threads"]


def merged(runs: Sequence[dict[str, Any]], newest: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a run; earlier ones lose the rows that it has, and go when they have no other."""
    taken = {key_of(row) for row in newest["rows"]}
    kept = [run | {"rows": [r for r in run["rows"] if key_of(r) not in taken]} for run in runs]
    return [*(run for run in kept if run["rows"]), newest]


def text_of(record: Mapping[str, Any]) -> str:
    """Return a machine's file: JSON with a line for each row."""
    runs = []
    for run in record["runs"]:
        head = json.dumps({key: value for key, value in run.items() if key != "rows"}, indent=1)
        rows = ",\n  ".join(json.dumps(row) for row in run["rows"])
        runs.append(f'{head[:-2]},\n "rows": [\n  {rows}]}}')
    return f'{{"name": {json.dumps(record["name"])},\n"runs": [\n' + ",\n".join(runs) + "]}\n"


def commit() -> str:
    """Return what is checked out; BENCH_COMMIT says it where the sources came without git."""
    told = os.environ.get("BENCH_COMMIT")
    if told:
        return told
    command = ["git", "describe", "--always", "--abbrev=9", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _without_save(words: Sequence[str]) -> list[str]:
    """Return the command's words without --save and its value, which say where, not what."""
    kept, skips = [], False
    for word in words:
        skips, was = False, skips
        if word == "--save":
            skips = True
        elif not word.startswith("--save=") and not (was and not word.startswith("-")):
            kept.append(word)
    return kept


def _rounded(value: float) -> float:
    return float(f"{value:.{_NO_DIGITS}g}")
