"""The command line: python -m deepspeed_ext.config check FILE, and ... keys [FILE]."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from deepspeed_ext.config.config import Examined, examine, open_sentence
from deepspeed_ext.config.kinds import shown
from deepspeed_ext.config.page import page
from deepspeed_ext.op_builder import program

OP = "config check"
_NARROWEST = 40
_GAP = "  "


def _table(rows: list[tuple[str, str, str]], width: int) -> Iterator[str]:
    """Yield the lines of a table of key, value and effect that is at most so wide."""
    rows = [("key", "value", "effect"), *rows]
    room = max(width, _NARROWEST) - 2 * len(_GAP)
    longest = [max(len(row[column]) for row in rows) for column in range(2)]
    first = min(longest[0], room * 2 // 5)
    second = min(longest[1], room // 4)
    widths = (first, second, room - first - second)
    for row in rows:
        cells = [_wrapped(text, size) for text, size in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            parts = (cell[i] if i < len(cell) else "" for cell in cells)
            padded = (f"{part:{size}}" for part, size in zip(parts, widths, strict=True))
            yield _GAP.join(padded).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Cut a text into lines, a path behind its dots and underscores where it is too long."""
    lines: list[str] = []
    for word in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        while len(word) > width:
            cut = max(word.rfind(sign, 0, width) for sign in "._") + 1 or width
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    return lines or [""]


def _check(path: str, processes: int | None, model: str | None) -> int:
    if not Path(path).is_file():
        print(f"config: file is {path}, expected one that is there", file=sys.stderr)
        return 1
    try:
        examined = examine(Path(path))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [(row.path, shown(row.value), row.effect) for row in examined.rows]
    for line in _table(rows, shutil.get_terminal_size().columns):
        print(line)
    problems = list(examined.problems)
    # What Trainer and accelerate fill is as it should be in a file for them.
    unfilled = [each for each in examined.found.left_open if not each[1]]
    problems += open_sentence(unfilled)
    if examined.config is not None:
        problems += _misfits(examined)
    if processes is not None and examined.config is not None:
        problems += _say_sizes(examined, processes)
    if model is not None and examined.config is not None and not problems:
        problems += _say_needs(examined, model, processes or 1)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def _say_sizes(examined: Examined, processes: int) -> list[str]:
    """Print the batch sizes on so many processes, or return what is wrong with them."""
    assert examined.config is not None
    waiting = {name for name, _ in examined.found.left_open}
    if waiting & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        return []
    try:
        sizes = examined.config.batch_sizes(processes)
    except ValueError as error:
        return [str(error)]
    print(
        f"\non {_processes(processes)} a step is {sizes.train} samples:"
        f" {sizes.steps} micro-steps of {sizes.micro} samples on each"
    )
    return []


def _waiting(examined: Examined, *begins: str) -> bool:
    """Tell whether a key of these is "auto" and waits for a value."""
    return any(name.startswith(begins) for name, _ in examined.found.left_open)


def _misfits(examined: Examined) -> list[str]:
    """Return what is wrong with the options of the optimizer and of the schedule."""
    config = examined.config
    assert config is not None
    if config.optimizer is None and config.scheduler is None:
        return []
    from deepspeed_ext.config.classes import Named, schedule_class  # with torch, for which alone

    problems = []
    try:
        block, offload = config.optimizer, config.zero_optimization.offload_optimizer
        if block is not None and not _waiting(examined, "optimizer."):
            Named(OP, block.type, block.params, "cpu", offload.device == "cpu").check_names()
    except ValueError as error:
        problems.append(str(error))
    try:
        if config.scheduler is not None and not _waiting(examined, "scheduler."):
            schedule_class(OP, config.scheduler)
    except ValueError as error:
        problems.append(str(error))
    return problems


def _say_needs(examined: Examined, folder: str, processes: int) -> list[str]:
    """Print what training a model takes, or return why that is not known."""
    assert examined.config is not None
    if _waiting(examined, "train_", "gradient_accumulation_steps", "optimizer.", "bf16.", "fp16."):
        return [f"{OP}: --model is given, expected a config that leaves nothing open by auto"]
    from deepspeed_ext.config.memory import described, needs_of

    try:
        weights = described(Path(folder))
        needs = needs_of(examined.config, weights, processes)
    except OSError as error:
        return [f"{OP}: --model is {folder}, expected a folder of safetensors files: {error}"]
    except ValueError as error:
        return [str(error)]
    count = sum(weight.numel() for weight in weights.values())
    where = _processes(processes)
    print(f"\n{count:,} parameters on {where}: each needs, beside activations, at most")
    rows = [(kind, *map(_size, sizes)) for kind, *sizes in needs.rows()]
    longest = max(len(row[0]) for row in rows)
    for kind, *sizes in (("", "GPU", "host", "disk"), *rows):
        print((f"{kind:{longest}}" + "".join(f"{size:>12}" for size in sizes)).rstrip())
    return []


def _processes(count: int) -> str:
    return f"{count} processes" if count > 1 else "one process"


def _size(nbytes: int) -> str:
    if nbytes == 0:
        return ""
    power = min(3, (nbytes.bit_length() - 1) // 10)
    unit = ("B", "KiB", "MiB", "GiB")[power]
    return f"{nbytes / 1024**power:.2f} {unit}" if power else f"{nbytes} {unit}"


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.config", description="Look at configs of DeepSpeed's."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = "print what comes of each key of a config; the status is 1 where it is refused"
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument("file", metavar="FILE", help="JSON")
    check.add_argument("--processes", type=int, metavar="N", help="also print the batch sizes on N")
    check.add_argument(
        "--model",
        metavar="FOLDER",
        help="also print what training it takes; with safetensors files",
    )
    text = "print the page on all keys, or write it into a file"
    keys = commands.add_parser("keys", help=text, description=text)
    keys.add_argument("file", metavar="FILE", nargs="?", help="default: standard output")
    options = parser.parse_args(arguments)
    if options.command == "check":
        return _check(options.file, options.processes, options.model)
    if options.file is None:
        print(page(), end="")
    else:
        Path(options.file).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
