"""Say why an op library cannot be compiled or loaded here, without trying and without a process."""

from collections.abc import Callable, Iterator
from pathlib import Path

from . import cuda, toolchain
from .errors import Unavailable
from .spec import OpSpec
from .wanted import CSRC, files_of


def why_not(spec: OpSpec, csrc: Path = CSRC) -> list[str]:
    """Return the reasons why `spec` cannot be compiled, each with its fix; empty when it can."""
    reasons = []
    for check in _needed_to_compile(spec, csrc):
        try:
            check()
        except Unavailable as missing:
            reasons.append(str(missing))
    return reasons


def why_not_load(spec: OpSpec) -> list[str]:
    """Return the reasons why not even a ready library of `spec` could be loaded."""
    try:
        toolchain.check_torch(spec)
    except Unavailable as missing:
        return [str(missing)]
    return []


def check_compilable(spec: OpSpec) -> None:
    """Raise Unavailable, with the first reason why `spec` cannot be compiled."""
    for check in _needed_to_compile(spec, CSRC):
        check()


def _needed_to_compile(spec: OpSpec, csrc: Path) -> Iterator[Callable[[], object]]:
    yield lambda: files_of(spec, csrc)
    yield toolchain.cxx
    yield toolchain.ninja
    yield toolchain.jobs
    if "torch" in spec.needs:
        yield toolchain.torch_version
    if "pybind11" in spec.needs:
        yield toolchain.python_include
        yield toolchain.pybind11_include
    if "cuda" in spec.needs:
        yield cuda.check_version
        yield cuda.requested_targets
