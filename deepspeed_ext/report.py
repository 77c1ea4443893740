"""ds_report: run every op that is there, say of the others why not, and describe the machine."""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Literal

from deepspeed_ext.environment import describe, torch_problem
from deepspeed_ext.op_builder import OPS, BuildError, OpSpec, cuda, load, probe, program
from deepspeed_ext.op_builder.registry import GROUPS

_WIDTH = 80
_COLOURS = {"works": "32", "not built": "33", "unavailable": "31"}


@dataclass(frozen=True)
class Row:
    """What was found out about one op.

    Args:
        op: its name.
        device: where it runs, "cpu" or "cuda".
        state: "works" when its self-check ran just now, "not built" when it would build.
        milliseconds: how long the self-check took, for an op that works.
        library: the file that was loaded, for an op that works.
        reason: cause and fix, for an op that does not work.
    """

    op: str
    device: str
    state: Literal["works", "not built", "unavailable"]
    milliseconds: float | None = None
    library: str | None = None
    reason: str | None = None

    def text(self) -> str:
        """Return what stands behind the state in the table."""
        return f": {self.reason}" if self.reason else f" (self-check in {self.milliseconds:.1f} ms)"


def check(spec: OpSpec, build: bool = False) -> Row:
    """Run the self-check of an op in a child process, as a bad library may crash it.

    Args:
        spec: the op, a row of the registry.
        build: compile its library when there is none.
    """
    context = multiprocessing.get_context("fork")  # this process has imported torch already
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_check_and_send, args=(spec, build, sender))
    child.start()
    sender.close()
    try:
        row: Row = receiver.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _unavailable(spec, f"its self-check ended with {died}; {_rebuild(spec)}")
    child.join()
    return row


def _check_and_send(spec: OpSpec, build: bool, sender: Connection) -> None:
    try:
        row = _without_torch(spec) or _check_here(spec, build)
    except Exception as error:  # a report has a row for whatever goes wrong
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        row = _unavailable(spec, f"its self-check failed with {cause}; {_rebuild(spec)}")
    sender.send(row)


def _without_torch(spec: OpSpec) -> Row | None:
    """Return the row of an op where torch cannot be imported; all ops are used through it."""
    problem = torch_problem()
    if problem is not None:
        return _unavailable(spec, problem)
    import torch

    torch.set_num_threads(1)  # a child would wait forever for threads that its parent has used
    return None


def _check_here(spec: OpSpec, build: bool) -> Row:
    reasons = _why_not_run(spec)
    if reasons:
        return _unavailable(spec, reasons[0])
    forbidden = os.environ.get("DS_EXT_JIT") == "0"
    if not build:
        os.environ["DS_EXT_JIT"] = "0"  # in this child: look for a library, do not compile one
    try:
        library = load(spec.name)
    except BuildError as error:
        # An error without routes comes from before the search: there is more wrong than a miss.
        if build or forbidden or not error.routes:
            return _unavailable(spec, f"{error.cause}; {error.fix}")
        reasons = probe.why_not(spec)
        if reasons:
            return _unavailable(spec, reasons[0])
        how = f"ds_report --build {spec.name} compiles it"
        return Row(spec.name, spec.device, "not built", reason=how)
    module, _, function = spec.self_check.partition(":")
    self_check = getattr(importlib.import_module(module), function)
    started = time.perf_counter()
    self_check(device=spec.device)
    milliseconds = round(1e3 * (time.perf_counter() - started), 3)
    return Row(spec.name, spec.device, "works", milliseconds, str(library))


def _why_not_run(spec: OpSpec) -> list[str]:
    """Return the reasons why an op could not run here even if it were built."""
    import torch

    if spec.device != "cuda" or torch.cuda.is_available():
        return []
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and torch.version.cuda is not None:
        return [f"no CUDA device is visible; unset CUDA_VISIBLE_DEVICES, which is {hidden!r}"]
    if cuda.device_capabilities():
        return [*probe.why_not_load(spec), "torch cannot use the CUDA device; update its driver"]
    return ["no CUDA device is visible; run on a machine with an NVIDIA GPU and a CUDA torch"]


def _unavailable(spec: OpSpec, reason: str) -> Row:
    return Row(spec.name, spec.device, "unavailable", reason=reason)


def _rebuild(spec: OpSpec) -> str:
    return f"run: python -m deepspeed_ext.op_builder clean, then: ds_report --build {spec.name}"


def _table(rows: list[Row], environment: dict[str, str], colour: bool) -> str:
    width = max((len(row.op) for row in rows), default=0)
    lines = [f"{'op':{width}}  device  state"]
    for row in rows:
        first, *others = _wrapped(f"{row.state}{row.text()}", width + 10)
        if colour:
            painted = f"\x1b[{_COLOURS[row.state]}m{row.state}\x1b[0m"
            first = painted + first.removeprefix(row.state)
        lines += [f"{row.op:{width}}  {row.device:6}  {first}", *others]
    width = max(len(name) for name in environment)
    lines.append("")
    for name, value in environment.items():
        first, *others = _wrapped(value, width + 2)
        lines += [f"{name:{width}}  {first}", *others]
    return "\n".join(lines)


def _wrapped(text: str, indent: int) -> list[str]:
    """Cut text into lines for the columns after `indent`; all but the first are indented."""
    width = _WIDTH - indent
    # A path stays in one piece, so that it can be copied.
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [lines[0], *(" " * indent + line for line in lines[1:])]


@program
def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 1 when an op that is named does not work, else 0.

    Args:
        arguments: the command line, None for that of this process.
    """
    parser = argparse.ArgumentParser(
        prog="ds_report", description="Run the self-check of each op and describe the machine."
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="only these; fail unless they work")
    parser.add_argument("--build", action="store_true", help="compile what is not built")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    known = [*(spec.name for spec in OPS), *GROUPS]
    for name in options.ops:
        if name not in known:
            print(f"ds_report: op is {name!r}, expected one of {', '.join(known)}", file=sys.stderr)
            return 1
    named = {member for name in options.ops for member in GROUPS.get(name, (name,))}
    chosen = [spec for spec in OPS if not options.ops or spec.name in named]
    torch_problem()  # imports it, once for all the children
    # The ops first: a child process can use CUDA only as long as its parent has not.
    rows = [check(spec, options.build) for spec in chosen]
    environment = describe()
    if options.json:
        ops = {row.op: asdict(row) for row in rows}
        text = json.dumps({"ops": ops, "environment": environment}, indent=1)
    else:
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        text = _table(rows, environment, colour=sys.stdout.isatty() and not plain)
    print(text)
    return int(bool(options.ops) and any(row.state != "works" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
