"""The ops as functions: each checked, documented, and with its reference in float64 beside it.

Importing this package imports nothing else. A function, its module and the op in torch's registry,
`torch.ops.deepspeed_ext.<name>`, come with the first use of the function's name. Code that takes an
op out of the registry, or loads a program that was exported with some in it, registers all by
`from deepspeed_ext.ops import *`. Nothing is compiled by any of this; see `_library`.

What every op raises stands here and in no docstring of one: ValueError if an argument breaks a rule
of its description, TypeError if it is None or of a class that the description does not name, both
with the op, the argument, its value and what is expected; BuildError if the native library of the
device could not be built or loaded, with the way out; torch.OutOfMemoryError, or RuntimeError on
the CPU, if there is no memory for a tensor. An op's own docstring has what it raises besides.

`__compatible_ops__` says for each op library by its name whether it can be used here, as it is or
after being compiled; `ds_report` says why not.
"""

import re
from importlib import import_module
from pathlib import Path

_IMPORT = re.compile(r"^from (\S+) import ([^(\n]+|\([^)]+\))", re.MULTILINE)
_NAMES = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {  # the module of each public name
    name: module
    for module, names in _IMPORT.findall(_NAMES)
    for name in re.findall(r"\w+ as (\w+)", names)
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__compatible_ops__":  # worked out when asked for
        from deepspeed_ext.op_builder import builders

        return {builder.NAME: builder().is_compatible() for builder in builders.BUILDERS.values()}
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
