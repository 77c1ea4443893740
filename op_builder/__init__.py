"""Build and load op libraries; importing this starts no process, compiles nothing, needs no torch.

The builder classes that users know, such as CPUAdamBuilder, are here too, made from the registry.

A load goes through loading.py: `Wanted` (wanted.py) says which library it must be; one that is
there is opened, else jit.py compiles it into the cache (cache.py, under a lock of lock.py). aot.py
compiles into a package while that is built. Both do so with compile.py. What is missing on the way
is raised as `Unavailable` and becomes a `BuildError` where the op's name is known (errors.py).
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
    if name.endswith("Builder"):
        return builders.__getattr__(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
