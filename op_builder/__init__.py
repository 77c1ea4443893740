"""Build and load op libraries; importing this starts no process, compiles nothing and needs no torch."""

from .errors import BuildError
from .jit import load
from .registry import OPS
from .spec import OpSpec

__all__ = ["OPS", "BuildError", "OpSpec", "load"]
