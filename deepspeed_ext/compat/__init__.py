"""DeepSpeed's names over what is here, for scripts and libraries that were written for it.

    import deepspeed_ext.compat as deepspeed

`names` has the tables: what each name is, and what to use in place of those that are not here, to
ask for which is an ImportError with that sentence. `python -m deepspeed_ext.compat enable` and
`install` are for libraries that look for an installed deepspeed; see `stand_in`.

Modules of this package hold state of the whole process where DeepSpeed's do: the process group, the
settings of `checkpointing`, and which engine a parameter belongs to; each says so.
"""

from importlib import import_module
from typing import Any

from deepspeed_ext.compat.modules import found, make_modules, names_in

make_modules()


def __getattr__(name: str) -> Any:
    return import_module(f"{__name__}.zero") if name == "zero" else found("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *names_in(""), "zero"})
