"""Plain values as text and back: what a checkpoint holds beside large tensors. Nothing is run."""

import base64
import json
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io.tensors import byte_view, plain

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_SIMPLE = (bool, int, float, str, type(None))


class NotPlain(TypeError):
    """A value is an object that cannot be read back without running something."""


def dumps(value: object) -> str:
    """Return a value as text.

    Args:
        value: None, bool, int, float, str, bytes, a tensor, a dtype, or lists, tuples, sets of
            such, or dicts with such as keys.

    Raises:
        NotPlain: it is something else; the text says where.
    """
    return json.dumps(_encoded(value, "value"), separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Return the value of a text.

    Raises:
        ValueError: the text is not what `dumps` writes.
    """
    try:
        return _decoded(json.loads(text))
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise ValueError(f"plain value is {str(text)[:80]}, expected what dumps writes") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as text."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a name; raises ValueError if there is none."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"dtype is {str(name)[:40]!r}, expected one of torch")
    return _DTYPES[name]


def _encoded(value: object, where: str) -> Any:
    """Return JSON; a list stands for a list, an object for anything that JSON lacks."""
    if type(value) in _SIMPLE:
        return value
    if type(value) is list:
        return [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {kind: [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_encoded(key, f"{where}'s key"), _encoded(item, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if type(value) is Tensor:
        content = bytes(byte_view(plain(value).cpu()).tolist())
        entry = [dtype_name(value.dtype), list(value.shape), base64.b64encode(content).decode()]
        return {"tensor": entry}
    raise NotPlain(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, expected numbers, text,"
        " tensors, and lists and dicts of them"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item) for item in content)
    if kind == "set":
        return {_decoded(item) for item in content}
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "dtype":
        return dtype_of(content)
    if kind == "tensor":
        dtype, shape, text = content
        raw = bytearray(base64.b64decode(text, validate=True))
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(dtype_of(dtype)).view(shape)
    raise ValueError(f"plain value has the kind {kind[:40]!r}, expected a known one")
