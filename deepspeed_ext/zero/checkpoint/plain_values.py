"""Plain values as text and back: what a checkpoint holds beside large tensors. Nothing is run."""

import base64
import importlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.saved_tensors import TORCH_DTYPES
from deepspeed_ext.io.tensors import bytes_of, check_kind, plain

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_SIMPLE = (bool, int, float, str, type(None))
_OF_FILES = set(TORCH_DTYPES.values())
_KINDS = "biufc"  # of NumPy's dtypes: numbers
_LARGE = 1 << 16  # bytes of a tensor that a text need not have
_LEVELS = 202  # of values in values: each takes three of the 1,000 calls that Python allows
_BITS = 14_000  # of an int: Python reads no more than 4,300 digits
_NO_ROOM = "here, expected more room; call it from fewer functions, or see sys.setrecursionlimit"
_SHOWN = 60  # characters of where something was found
Fetch = Callable[[str], Tensor]


class NotPlain(TypeError):
    """A value is an object that cannot be read back without running something."""


class OutOfRange(ValueError):
    """A value is plain, but nested so deep or so large that it may not be read back."""


def dumps(
    value: object, apart: dict[str, Tensor] | None = None, prefix: str = "", within: int = 0
) -> str:
    """Return a value as text, in which later changes of the value are not seen.

    Args:
        value: None, bool, int, float, str, bytes, a tensor, a dtype, an array or number of NumPy,
            an io.BytesIO, or lists, tuples, sets of such, or dicts with such as keys.
        apart: gets large tensors, by names of which the text has only these; None: it has all.
        prefix: of these names.
        within: so many values it will be saved.

    Raises:
        NotPlain: it is something else; the text says where.
        OutOfRange: it is nested deeper than 202 levels with those that it is within, contains
            itself, has an int of more than 14,000 bits, or there is no room on the stack for it.
    """
    has_all = apart is None
    encoder = _Encoder({} if apart is None else apart, prefix, has_all, _LEVELS - within)
    try:
        return json.dumps(encoder.encoded(value, "value", 0), separators=(",", ":"))
    except RecursionError:
        raise OutOfRange(
            f"value is nested deeper than there is room for on Python's stack {_NO_ROOM}"
        ) from None


def loads(text: str | bytes, fetch: Fetch | None = None) -> Any:
    """Return the value of a text.

    Args:
        text: of `dumps`.
        fetch: returns what stands apart, by its name.

    Raises:
        ValueError: the text is not what `dumps` writes.
    """
    try:
        return _decoded(json.loads(text), fetch)
    except RecursionError:
        raise ValueError(
            "zero.load: a value of the checkpoint is nested deeper than there is room for on"
            f" Python's stack {_NO_ROOM}"
        ) from None
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"plain value is {str(text)[:80]}, expected what dumps writes") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as text."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a name; raises ValueError if there is none."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"dtype is {str(name)[:40]!r}, expected one of torch")
    return _DTYPES[name]


class _Encoder:
    """Makes JSON of values: a list stands for a list, an object for anything that JSON lacks."""

    def __init__(self, apart: dict[str, Tensor], prefix: str, has_all: bool, levels: int) -> None:
        self._apart = apart
        self._prefix = prefix
        self._has_all = has_all
        self._levels = levels

    def encoded(self, value: object, where: str, level: int) -> Any:
        """Return JSON of a value, found there, in so many others."""
        if type(value) in _SIMPLE:
            return _checked(value, where)
        if isinstance(value, list | tuple | set | frozenset | dict) and level >= self._levels:
            raise OutOfRange(
                f"{where[:_SHOWN]}... is nested deeper than {self._levels} levels, or contains"
                " itself, expected fewer levels; flatten it, or save it as text or bytes"
            )
        level += 1
        if type(value) is list:
            return [self.encoded(item, f"{where}[{i}]", level) for i, item in enumerate(value)]
        if isinstance(value, tuple | set | frozenset):
            kind = "tuple" if isinstance(value, tuple) else "set"
            items = enumerate(value)
            return {kind: [self.encoded(item, f"{where}[{i}]", level) for i, item in items]}
        if isinstance(value, dict):
            return {
                "dict": [
                    [
                        self.encoded(key, f"{where}'s key", level),
                        self.encoded(item, f"{where}[{key!r}]", level),
                    ]
                    for key, item in value.items()
                ]
            }
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        made = _bytes_or_array(value)
        if made is None:
            raise NotPlain(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, expected"
                " numbers, text, tensors, and lists and dicts of them"
            )
        return made

    def _tensor(self, value: Tensor, where: str) -> Any:
        try:
            value = check_kind(where, value)
        except (TypeError, ValueError) as error:
            raise NotPlain(str(error)) from None
        if not self._has_all and value.nbytes >= _LARGE and value.dtype in _OF_FILES:
            name = f"{self._prefix}.{len(self._apart)}"
            self._apart[name] = value.detach()
            return {"apart": name}
        content = bytes_of(plain(value).cpu())
        return {"tensor": [dtype_name(value.dtype), list(value.shape), _text(content)]}


def _checked(value: object, where: str) -> object:
    """Return a value that JSON has; raise if it is a number that Python would not read."""
    if type(value) is int and value.bit_length() > _BITS:
        raise OutOfRange(
            f"{where} is an int of {value.bit_length()} bits, expected at most {_BITS}; save it as"
            " bytes"
        )
    return value


def _bytes_or_array(value: object) -> Any:
    """Return JSON of what is bytes, or NumPy's; None of anything else."""
    if isinstance(value, bytes | bytearray):
        return {"bytes": _text(value)}
    if isinstance(value, io.BytesIO):
        return {"file": _text(value.getvalue())}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    numpy = sys.modules.get("numpy")  # without it there are no arrays
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    if value.dtype.kind not in _KINDS:
        return None
    kind = "array" if isinstance(value, numpy.ndarray) else "number"
    return {kind: [value.dtype.str, list(value.shape), _text(value.tobytes())]}


def _text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _decoded(value: Any, fetch: Fetch | None, is_hashed: bool = False) -> Any:
    """Return what JSON stands for; `is_hashed`: in a set or a key, where sets are frozen."""
    if isinstance(value, list):
        return [_decoded(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item, fetch, is_hashed) for item in content)
    if kind == "set":
        made = frozenset if is_hashed else set
        return made(_decoded(item, fetch, True) for item in content)
    if kind == "dict":
        return {_decoded(key, fetch, True): _decoded(item, fetch) for key, item in content}
    if kind == "apart" and fetch is not None:
        return fetch(content)
    if kind in _SINGLE:
        return _SINGLE[kind](content)
    raise ValueError(f"plain value has the kind {kind[:40]!r}, expected a known one")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor_of(content: Any) -> Tensor:
    dtype, shape, text = content
    raw = bytearray(_bytes(text))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype_of(dtype)).view(shape)


def _array_of(content: Any) -> Any:
    numpy: Any = importlib.import_module("numpy")
    dtype, shape, text = content
    if numpy.dtype(dtype).kind not in _KINDS:
        raise ValueError(f"plain value has an array of {str(dtype)[:40]!r}, expected numbers")
    return numpy.frombuffer(_bytes(text), dtype=dtype).reshape(shape).copy()


_SINGLE: dict[str, Callable[[Any], Any]] = {
    "bytes": _bytes,
    "file": lambda text: io.BytesIO(_bytes(text)),
    "dtype": lambda name: dtype_of(name),
    "tensor": _tensor_of,
    "array": _array_of,
    "number": lambda content: _array_of(content)[()],
}
