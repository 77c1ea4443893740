"""Build and load op libraries; importing this starts no process, compiles nothing, needs no torch.

The builder classes that users know, such as CPUAdamBuilder, are here too, made from the registry.
"""

from . import builders
from .builders import OpBuilder
from .errors import BuildError
from .loading import load, load_module
from .pipes import program
from .registry import OPS
from .spec import OpSpec

__all__ = ["OPS", "BuildError", "OpBuilder", "OpSpec", "load", "load_module", "program"]


def __getattr__(name: str) -> type[OpBuilder]:
    if name in builders.BUILDERS:
        return builders.BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
