"""From what `read` is given to a plain dict of its own: a dict, a file, or base64."""

import base64
import binascii
import json
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_ext.config.kinds import shown, thawed

Source = Mapping[str, Any] | str | os.PathLike[str]
_KINDS = "a dict, the path of a JSON file that is there, or base64 of JSON"


def plain(source: Source) -> dict[str, Any]:
    """Return the config as a dict; nothing of the source is shared.

    Raises:
        ValueError: it is of no such kind, or the JSON is wrong or has a key twice.
    """
    if isinstance(source, Mapping):
        return _with_texts_for_keys(thawed(source))
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"config: source is of type {type(source).__name__}, expected {_KINDS}")
    path = Path(source)
    if _is_there(path):
        if not path.is_file():
            raise ValueError(f"config: source is the folder {path}, expected {_KINDS}")
        data, name = path.read_bytes(), str(path)
    else:
        data, name = _decoded(os.fspath(source)), "the base64 text"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {name} has {error.reason}, expected JSON in UTF-8") from None
    return _parsed(text, name)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a path can be, or with a zero in it
        return False


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"config: source is {shown(text)}, expected {_KINDS}") from None


def _with_texts_for_keys(values: dict[Any, Any], path: str = "") -> dict[str, Any]:
    for name, value in values.items():
        if not isinstance(name, str):
            where = path.rstrip(".") or "the config"
            raise ValueError(f"config: {where} has the key {name!r}, expected a text")
        if isinstance(value, dict):
            _with_texts_for_keys(value, f"{path}{name}.")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Twice(twice)
    return values


class _Twice(Exception):
    """A key that one object has twice."""


def _parsed(text: str, name: str) -> dict[str, Any]:
    if not text.strip():
        raise ValueError(f"config: {name} is empty, expected a JSON object")
    try:
        values = _loaded(text, name)
    except _Twice as error:
        raise ValueError(f"config: {error} is twice in {name}, expected once") from None
    except RecursionError:
        raise ValueError(f"config: {name} is nested too deep, expected a JSON object") from None
    if not isinstance(values, dict):
        raise ValueError(f"config: {name} is {shown(values)}, expected a JSON object")
    return values


def _loaded(text: str, name: str) -> Any:
    """Parse as JSON, or as Hjson where that is installed and the text is no JSON."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        if find_spec("hjson") is not None:
            return _loaded_by_hjson(text, name)
        line = text.splitlines()[error.lineno - 1] if error.lineno <= text.count("\n") + 1 else ""
        got = shown(line[error.colno - 1 :].strip()[:30])
        hint = ""
        if any(each.lstrip().startswith(("//", "#", "/*")) for each in text.splitlines()) or (
            line[error.colno - 1 :].lstrip().startswith(("//", "#", "/*"))
        ):
            hint = " without comments; take them out, or pip install hjson"
        raise ValueError(
            f"config: {name} has {got} in line {error.lineno}, column {error.colno},"
            f" expected JSON{hint}"
        ) from None


def _loaded_by_hjson(text: str, name: str) -> Any:
    hjson = import_module("hjson")
    try:
        return hjson.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"config: {name} has {error}, expected JSON or Hjson") from None
