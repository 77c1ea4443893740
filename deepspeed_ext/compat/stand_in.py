"""A package named deepspeed that is this one: for a process, or written into the environment.

Hugging Face's libraries ask whether a deepspeed is installed, and of which version, when they are
imported. The version says what is here: tensor and sequence parallel, which come with 0.16.4 and
0.18.2, are refused by them.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from deepspeed_ext.compat.names import HERE, MODULES_NOT_HERE

NAME = "deepspeed"
SUFFIX = "+deepspeed.ext"
__version__ = f"0.16.3{SUFFIX}"
METADATA = f"""\
Metadata-Version: 2.1
Name: {NAME}
Version: {__version__}
Summary: deepspeed_ext under the name of deepspeed; python -m deepspeed_ext.compat wrote it
Requires-Dist: deepspeed_ext
"""
_TOO_LATE = (NAME, "accelerate", "transformers", "lightning", "peft", "trl")


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata is told of the package in this process."""

    def read_text(self, filename: str) -> str | None:
        return METADATA if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class _Finder:
    """Finds no modules, as these are made, but the metadata."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        return None

    @staticmethod
    def find_distributions(context: Any) -> Iterator[importlib.metadata.Distribution]:
        if context.name is None or context.name.lower() == NAME:
            yield _Distribution()


def stand_in() -> None:
    """Let deepspeed and its modules be those of this package, in this process."""
    package = "deepspeed_ext.compat"
    for path in sorted({*HERE, *MODULES_NOT_HERE, "zero"} - {""}):
        sys.modules[f"{NAME}.{path}"] = import_module(f"{package}.{path}")
    sys.modules[NAME] = import_module(package)


def install() -> None:
    """Let this process find a deepspeed that is this package, before others look for it.

    Child processes do not have it; `python -m deepspeed_ext.compat enable` is for them too. Where
    that was called, or this before, it does nothing.

    Raises:
        RuntimeError: a real deepspeed is there, or a library that looks for it was imported.
    """
    if sys.modules.get(NAME) is sys.modules["deepspeed_ext.compat"]:
        return
    late = [name for name in _TOO_LATE if name in sys.modules]
    if NAME not in late:
        real = real_deepspeed()
        if real is not None:
            raise RuntimeError(
                f"compat.install: {real} is there, expected no deepspeed; uninstall it"
            )
        if importlib.util.find_spec(NAME) is not None:
            return
    if late:
        raise RuntimeError(
            f"compat.install: {', '.join(late)} {'are' if len(late) > 1 else 'is'} imported,"
            " expected the call before that"
        )
    sys.meta_path.append(_Finder())
    stand_in()


def real_deepspeed() -> str | None:
    """Return what a deepspeed is called that this package has not written, if there is one."""
    for found in importlib.metadata.distributions(name=NAME):
        if not found.version.endswith(SUFFIX):
            return f"{NAME} {found.version}"
    spec = importlib.util.find_spec(NAME)
    origin = None if spec is None else spec.origin
    return None if origin is None or is_ours(Path(origin)) else origin


def is_ours(file: Path) -> bool:
    """Tell whether a file was written by this package."""
    try:
        return "deepspeed_ext.compat" in file.read_text()
    except (OSError, UnicodeDecodeError):
        return False
