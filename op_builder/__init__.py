"""Build and load op libraries; importing this compiles nothing and needs no torch."""

from . import builders
from .builders import BUILDERS, OpBuilder
from .errors import BuildError
from .jit import load
from .registry import OPS
from .spec import OpSpec

__all__ = ["BUILDERS", "OPS", "BuildError", "OpBuilder", "OpSpec", "load"]


def __getattr__(name: str) -> type[OpBuilder]:
    return builders.__getattr__(name)
