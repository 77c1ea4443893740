"""The command line: python -m deepspeed_ext.op_builder list | build [names] | clean | path."""

import argparse
import json
import shutil
import sys
import textwrap
from pathlib import Path

from . import cache, loading, probe
from .errors import BuildError, Unavailable
from .jit import compile_into_cache
from .pipes import program
from .registry import OPS, specs_of
from .spec import OpSpec
from .wanted import Wanted

_NAME_WIDTH = max(len(spec.name) for spec in OPS) + 2


def _row(name: str, state: str, *details: str) -> None:
    """Print a row of the table; details are wrapped below it so that they fit the terminal."""
    print(f"{name:<{_NAME_WIDTH}}{state}")
    width = max(40, shutil.get_terminal_size().columns)
    for detail in details:
        print(
            textwrap.fill(
                detail,
                width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _list() -> int:
    for spec in OPS:
        library, reasons = loading.status(spec)
        if library is None:
            state = "unavailable" if reasons else "not built"
        elif library.parent == loading.PREBUILT:
            state = "packaged"
        else:
            state = "compiled"
        _row(spec.name, f"{spec.device:<6}{state}", *([str(library)] if library else []), *reasons)
    return 0


def _build(names: list[str]) -> int:
    failed = 0
    for spec in [spec for name in names for spec in specs_of(name)] or OPS:
        reasons = probe.why_not(spec)
        if reasons and not names:
            _row(spec.name, "skipped", *reasons)
            continue
        try:
            wanted = Wanted.of(spec)
            library = next(loading.ready(wanted), None)
            if library is None:
                probe.check_compilable(spec)
                library = compile_into_cache(wanted)
            _row(spec.name, "ready", str(library), *_recorded(spec, library))
        except Unavailable as missing:
            failed = 1
            _row(spec.name, "failed", *str(BuildError.of(spec.name, missing)).splitlines())
    return failed


def _recorded(spec: OpSpec, library: Path) -> list[str]:
    """Return what the build wrote down about itself."""
    try:
        record = json.loads(library.with_name("build.json").read_text())
    except (OSError, ValueError):
        return []
    return [f"{key}: {value}" for key, value in record.items() if value and key != "op"]


def _clean() -> int:
    removed, left = cache.clean()
    for path in removed:
        print(f"removed {path}")
    for path, why in left.items():
        print(f"left {path}: {why}")
    return 1 if left else 0


@program
def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.op_builder", description="Compile and inspect op libraries."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show every op and whether its library is there")
    commands.add_parser("build", help="compile ops into the cache").add_argument(
        "names",
        nargs="*",
        metavar="name",
        help="ops to compile, or groups of them; all that can be when none is given",
    )
    commands.add_parser("clean", help="remove what was compiled into the cache")
    commands.add_parser("path", help="print the folder of the cache")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "list":
            return _list()
        if chosen.command == "build":
            return _build(chosen.names)
        if chosen.command == "clean":
            return _clean()
        print(cache.configured_root() or cache.private_root())
        return 0
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
