"""Modules under DeepSpeed's names, whose contents are imported when they are asked for."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deepspeed_ext.compat.names import ALL, HERE, MODULES_NOT_HERE, NAMES_NOT_HERE

_PACKAGE = "deepspeed_ext.compat"


class Names(ModuleType):
    """A module of DeepSpeed's, of the table of names.

    Args:
        path: its name below deepspeed.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{_PACKAGE}.{path}", f"What deepspeed.{path} has of what is here.")
        self.__spec__ = ModuleSpec(self.__name__, None)
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return found(self._path, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_in(self._path)})


def found(path: str, name: str) -> Any:
    """Return what a module of DeepSpeed's has under a name.

    Args:
        path: of the module below deepspeed; '' is deepspeed itself.
        name: of what is in it.

    Raises:
        ImportError: it is not here; the text says what to use.
        AttributeError: DeepSpeed has no such name, or none that is known here.
    """
    for home, names in HERE.get(path, {}).items():
        if names != ALL and name in names.split():
            return getattr(import_module(home), name)
    whole = f"{path}.{name}".lstrip(".")
    if not (name.startswith("__") and name.endswith("__")):
        for home, names in HERE.get(path, {}).items():
            if names == ALL and hasattr(import_module(home), name):
                return getattr(import_module(home), name)
        instead = {**MODULES_NOT_HERE, **NAMES_NOT_HERE}
        begins = [known for known in instead if f"{whole}.".startswith(f"{known}.")]
        if begins:
            text = instead[max(begins, key=len)]
            raise ImportError(f"compat: deepspeed.{whole} is not here; {text}")
    raise AttributeError(f"deepspeed.{whole} is no name that compat knows")


def names_in(path: str) -> list[str]:
    """Return what is in a module of DeepSpeed's, modules too."""
    given: list[str] = []
    for home, names in HERE.get(path, {}).items():
        given += names.split() if names != ALL else getattr(import_module(home), "__all__", [])
    before = f"{path}." if path else ""
    inside = [other.removeprefix(before) for other in HERE if other.startswith(before)]
    return given + [name for name in inside if name and "." not in name]


def make_modules() -> None:
    """Make the modules of the tables, so that import statements find them below this package."""
    for path in sorted({*HERE, *MODULES_NOT_HERE} - {""}):
        parent, _, name = path.rpartition(".")
        module = Names(path)
        sys.modules[module.__name__] = module
        if not any(name in names.split() for names in HERE.get(parent, {}).values()):
            setattr(sys.modules[f"{_PACKAGE}.{parent}".rstrip(".")], name, module)
