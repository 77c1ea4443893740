"""Say why an op library cannot be compiled or loaded here, without trying and without a process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from . import cuda, toolchain
from .errors import Unavailable
from .sources import CSRC, files_of
from .spec import OpSpec


def why_not(spec: OpSpec, csrc: Path = CSRC) -> list[str]:
    """Return the reasons why `spec` cannot be compiled, each with its fix; empty when it can."""
    return _failures(_needed_to_compile(spec, csrc))


def why_not_load(spec: OpSpec) -> list[str]:
    """Return the reasons why not even a ready library of `spec` could be loaded."""
    return _failures([lambda: check_loadable(spec)])


def check_loadable(spec: OpSpec) -> None:
    """Raise Unavailable when this torch cannot load a library of `spec`."""
    if "torch" in spec.needs:
        toolchain.torch_version()
    if "cuda" in spec.needs and toolchain.torch_cuda() is None:
        raise Unavailable(
            "it is a CUDA op, but the torch that is installed has no CUDA",
            "install a CUDA build of torch",
        )


def check_allowed(spec: OpSpec) -> None:
    """Raise Unavailable when DS_EXT_JIT=0 forbids `load` to compile."""
    if os.environ.get("DS_EXT_JIT") == "0":
        raise Unavailable(
            "no ready library fits, and DS_EXT_JIT=0 forbids compiling one",
            f"run: unset DS_EXT_JIT, or: python -m deepspeed_ext.op_builder build {spec.name}",
        )


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


def _failures(checks: Iterator[Callable[[], object]] | list[Callable[[], object]]) -> list[str]:
    reasons = []
    for check in checks:
        try:
            check()
        except Unavailable as missing:
            reasons.append(str(missing))
    return reasons
