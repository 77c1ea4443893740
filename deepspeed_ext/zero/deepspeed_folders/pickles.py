"""DeepSpeed's pickled files, read without running anything that is in them."""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from deepspeed_ext.io.regular_file import open_regular
from deepspeed_ext.io.tensors import a, check_kind

OP = "zero.import_deepspeed"


class _Attributes:
    """Stands for a class of DeepSpeed: keeps what an object of it was saved with, and does nothing.

    Attributes:
        saved: by name.
    """

    saved: dict[str, Any]

    def __init__(self, *ignored: object) -> None:
        self.saved = {}

    def __setstate__(self, state: object) -> None:
        self.saved = dict(state) if isinstance(state, dict) else {}


class DynamicScaler(_Attributes):
    """Stands for the loss scaler whose scale moves."""


class StaticScaler(_Attributes):
    """Stands for the loss scaler whose scale does not move."""


class _Fragment(_Attributes):
    """Stands for where a parameter lies in a process's part, which the shapes tell as well."""


class _Stage(int):
    """Stands for the stage of ZeRO."""


# The names under which DeepSpeed pickles them.
_STAND_INS = (
    (StaticScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dict that a file holds, as `read_object` does."""
    content = read_object(path)
    if not isinstance(content, dict):
        raise ValueError(f"{OP}: {path} is {a(content)}, expected a dict")
    return content


def read_object(path: Path) -> Any:
    """Return what a file holds; its tensors are mapped into memory, not read.

    Only torch's weights-only loader touches it, which makes tensors, plain values and the classes
    here that stand for those of DeepSpeed.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: it was cut short, or has anything else in it, which is named.
    """
    os.close(open_regular(OP, path, os.O_RDONLY))
    can_be_mapped = zipfile.is_zipfile(path)  # torch before 1.6 wrote no such files
    try:
        with safe_globals(list(_STAND_INS)):
            content = torch.load(path, map_location="cpu", mmap=can_be_mapped, weights_only=True)
    except Exception as error:  # of a pickle that somebody has made up, any
        foreign = _foreign(path) if can_be_mapped else []
        if foreign:
            raise ValueError(
                f"{OP}: {path} has {', '.join(foreign)} in it, expected tensors, plain values and"
                " DeepSpeed's loss scaler only; nothing of it was run"
            ) from None
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"{OP}: {path} has no content that can be read, expected a file of torch.save, whole:"
            f" {type(error).__name__}: {reason}"
        ) from None
    return content


def _foreign(path: Path) -> list[str]:
    """Return the names of what is in a file and is not taken."""
    try:
        with safe_globals(list(_STAND_INS)):
            return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # it is not even a pickle
        return []


class Fields:
    """The fields of a dict in a file, each checked when it is asked for.

    Args:
        path: of the file.
        content: the dict.
    """

    def __init__(self, path: Path, content: object, where: str = "") -> None:
        self.path = path
        self._where = where
        if not isinstance(content, dict):
            raise ValueError(f"{OP}: {path} has {a(content)} as {where}, expected a dict")
        self.content: dict[Any, Any] = content

    def __contains__(self, key: object) -> bool:
        return key in self.content

    def get(self, key: Any, *kinds: type, default: Any = ...) -> Any:
        """Return a field, of one of these types; where there is none or None, the default."""
        found = self.content.get(key)
        if found is None and default is not ...:
            return default
        if not isinstance(found, kinds):
            got = f"{a(found)} as" if key in self.content else "no"
            raise ValueError(
                f"{OP}: {self.path} has {got} {self.title(key)}, expected"
                f" {' or '.join(kind.__name__ for kind in kinds)}"
            )
        return found

    def inside(self, key: Any) -> "Fields":
        """Return the fields of a dict that is a field."""
        return Fields(self.path, self.get(key, dict), self.title(key))

    def tensors(self, key: Any) -> list[Tensor]:
        """Return a field that is a list of flat tensors."""
        return [self.flat(item, f"{key}[{i}]") for i, item in enumerate(self.get(key, list, tuple))]

    def flat(self, value: object, key: str) -> Tensor:
        """Return a value that is a flat tensor."""
        found = self.tensor(value, key)
        if found.dim() != 1:
            raise ValueError(
                f"{OP}: {self.path} has shape {list(found.shape)} for {self.title(key)}, expected"
                " one dimension"
            )
        return found

    def tensor(self, value: object, key: str) -> Tensor:
        """Return a value that is a tensor, all of which is in the file."""
        try:
            found = check_kind(f"{OP}: {self.path}: {self.title(key)}", value).detach()
        except TypeError as error:
            raise ValueError(str(error)) from None
        if not found.is_contiguous():
            raise ValueError(
                f"{OP}: {self.path} has strides {list(found.stride())} for {self.title(key)},"
                " expected a contiguous tensor"
            )
        return found

    def shapes(self, key: str, value: object) -> dict[str, torch.Size]:
        """Return the shapes of parameters by their names."""
        found = Fields(self.path, value, self.title(key))
        return {
            found.text(name): shape_of(self.path, name, shape)
            for name, shape in found.content.items()
        }

    def text(self, name: object) -> str:
        """Return the name of a parameter."""
        if not isinstance(name, str):
            raise ValueError(f"{OP}: {self.path} has the name {name!r:.80}, expected text")
        return name

    def title(self, key: object) -> str:
        """Return what a field is called in an error."""
        return f"{self._where}[{key!r}]" if self._where else repr(key)


def is_same(one: object, other: object) -> bool:
    """Tell whether two plain values are equal; tensors of several elements are none."""
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def shape_of(path: Path, name: str, shape: object) -> torch.Size:
    """Return a shape that a file has for a parameter."""
    if isinstance(shape, Sequence) and all(type(n) is int and n >= 0 for n in shape):
        return torch.Size(shape)
    raise ValueError(f"{OP}: {path} has shape {shape!r:.80} for {name!r}, expected sizes")
