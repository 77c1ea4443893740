"""What is found in a config before values are read: each key, what comes of it, and problems."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

from deepspeed_ext.config import refusals
from deepspeed_ext.config.block import Block
from deepspeed_ext.config.kinds import (
    AUTO,
    FLAG,
    Effect,
    Key,
    Reader,
    does,
    loosely_read,
    nowhere,
    shown,
)
from deepspeed_ext.config.tree import KNOWN_PARAMS, Root

_COMMENT = nowhere("a comment")
_DOTTED = nowhere("a path is no key; put the key into its block")  # TRL writes such ones
_PASSED = does("is passed on")
_AS_WITHOUT = "as without it"
_OFF = "asks for nothing"


@dataclass(frozen=True)
class Row:
    """A key that is given.

    Args:
        path: as it is given.
        value: as it is given.
        effect: what comes of it, in words.
    """

    path: str
    value: object
    effect: str


@dataclass
class Found:
    """What a walk has found.

    Args:
        values: of declared keys, by their own names, for the tree.
        given: the whole config.
        rows: each key that is given.
        paths: of each declared key that is given, as it was, by its path in the tree.
        warnings, problems: sentences.
        left_open: the path of each "auto" that somebody has to fill, and who does.
    """

    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_open: list[tuple[str, str]] = field(default_factory=list)

    def warn(self, path: str, key: Key) -> None:
        """Say once that a key changes nothing."""
        if key.effect is Effect.SO_ANYWAY:
            self.warnings.append(f"config: {path} changes nothing: {key.text}, whatever it says")
        elif key.effect is Effect.NOWHERE:
            self.warnings.append(f"config: {path} acts nowhere: it is {key.text}")

    def fail(self, path: str, got: str, expected: str) -> None:
        """Add a problem in the form of the house."""
        self.problems.append(f"config: {path} {got}, expected {expected}")


def key_of(block: type[Block], name: str) -> Key:
    """Return what is declared of a field."""
    return next(each for each in block.model_fields[name].metadata if isinstance(each, Key))


def block_of(block: type[Block], name: str) -> type[Block] | None:
    """Return the class of a field that is a block, else None."""
    kind: Any = block.model_fields[name].annotation
    blocks = (each for each in get_args(kind) or (kind,) if isinstance(each, type))
    return next((each for each in blocks if issubclass(each, Block)), None)


@cache
def names_of(block: type[Block]) -> Mapping[str, str]:
    """Return the field that each name of a block stands for."""
    names = {name: name for name in block.model_fields}
    return names | {older: name for name in names for older in key_of(block, name).older}


@cache
def all_paths() -> tuple[str, ...]:
    """Return the path of every key that is known, refused ones too."""
    return tuple(sorted({*_paths(Root), *refusals.OF}))


def _paths(block: type[Block]) -> Iterator[str]:
    for name, field_name in names_of(block).items():
        yield f"{block.place}{name}"
        inner = block_of(block, field_name)
        if inner is not None and name == field_name:
            yield from _paths(inner)


def walk(given: dict[str, Any]) -> Found:
    """Look at each key of a config; nothing of it is changed but in `values`."""
    found = Found(given)
    zero = given.get("zero_optimization")
    if isinstance(zero, bool):  # as in the oldest configs
        given = {**given, "zero_optimization": {"stage": int(zero)}}
    found.values = _walk_block(Root, given, "", found)
    _rename(found.values.get("zero_optimization", {}), found)
    if any(each.startswith("config: optimizer.type ") for each in found.problems):
        of_it = "config: optimizer.params."  # its arguments say nothing more
        found.problems = [each for each in found.problems if not each.startswith(of_it)]
    return found


def _walk_block(
    block: type[Block], given: Mapping[str, Any], path: str, found: Found
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in given.items():
        shown_path, place = f"{path}{name}", f"{block.place}{names_of(block).get(name, name)}"
        if value is None and (name in names_of(block) or place in refusals.OF):
            found.rows.append(Row(shown_path, value, _AS_WITHOUT))
            continue
        if value != AUTO and _refused(place, shown_path, value, found):
            continue
        if name in names_of(block):
            _declared(block, names_of(block)[name], value, shown_path, values, found)
        elif place in refusals.OF:
            if value == AUTO:
                found.left_open.append((shown_path, ""))
            found.rows.append(Row(shown_path, value, _OFF))
        elif _is_comment(name) or name in all_paths():
            key = _COMMENT if _is_comment(name) else _DOTTED
            found.warn(shown_path, key)
            found.rows.append(Row(shown_path, value, f"nowhere: {key.text}"))
        else:
            _unknown(block, name, value, shown_path, found)
    return values


def _is_comment(name: str) -> bool:
    return name.startswith("_") or name.lower() in ("comment", "comments")


def _refused(place: str, path: str, value: object, found: Found) -> bool:
    for refusal in refusals.OF.get(place, ()):
        if refusal.asks(value):
            got = f"is {shown(value)}"
            found.fail(path, got, f"{refusal.expected}; {refusal.instead}")
            found.rows.append(Row(path, value, f"refused: {refusal.instead}"))
            return True
    return False


def _declared(
    block: type[Block], name: str, value: Any, path: str, values: dict[str, Any], found: Found
) -> None:
    key, place, inner = key_of(block, name), f"{block.place}{name}", block_of(block, name)
    if place in found.paths:
        found.fail(path, f"is given beside {found.paths[place]}", "one of these names")
        return
    found.paths[place] = path
    if inner is not None:
        if not isinstance(value, Mapping):
            found.fail(path, f"is {shown(value)}", "an object")
            return
        values[name] = _walk_block(inner, value, f"{path}.", found)
        return
    if f"{place}." in KNOWN_PARAMS:
        if not isinstance(value, Mapping):
            found.fail(path, f"is {shown(value)}", "an object")
            return
        values[name] = _params(f"{place}.", value, f"{path}.", found)
        return
    if value == AUTO:
        del found.paths[place]
        if key.effect is Effect.DOES and not key.auto_is_default:
            found.left_open.append((path, key.filler))
        found.rows.append(Row(path, value, _of_auto(key)))
        return
    values[name] = value
    found.warn(path, key)
    found.rows.append(Row(path, value, _words(key, _is_default(block, name, value))))


def _is_default(block: type[Block], name: str, value: object) -> bool:
    """Tell whether a key says what is so without it."""
    field_info = block.model_fields[name]
    reader = next(each for each in field_info.metadata if isinstance(each, Reader))
    try:
        return not field_info.is_required() and reader.read(value) == field_info.default
    except ValueError:
        return False  # the tree says what is wrong


def _params(place: str, given: Mapping[str, Any], path: str, found: Found) -> dict[str, Any]:
    """Return the arguments of an optimizer or a schedule that act, as they are read."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        key = _COMMENT if _is_comment(name) else KNOWN_PARAMS[place].get(name, _PASSED)
        if value is None:
            found.rows.append(Row(f"{path}{name}", value, _AS_WITHOUT))
            continue
        if value == AUTO or (isinstance(value, list) and AUTO in value):
            found.left_open.append((f"{path}{name}", key.filler))
            found.rows.append(Row(f"{path}{name}", value, _of_auto(key)))
            continue
        if _refused(f"{place}{name}", f"{path}{name}", value, found):
            continue
        found.warn(f"{path}{name}", key)
        found.rows.append(Row(f"{path}{name}", value, _words(key)))
        if key.effect is Effect.DOES:
            try:
                values[name] = loosely_read(value)
            except ValueError:
                found.fail(f"{path}{name}", f"is {shown(value)}", "a number")
    return values


def _words(key: Key, is_default: bool = False) -> str:
    if key.effect is Effect.DOES:
        return _AS_WITHOUT if is_default else key.text
    return f"{key.effect.value}: {key.text}"


def _of_auto(key: Key) -> str:
    if key.effect is not Effect.DOES or key.auto_is_default:
        return f"the default; {_words(key)}"
    return f"open: {key.filler or 'you'} {'fill it' if not key.filler else 'fills it'}"


def _unknown(block: type[Block], name: str, value: Any, path: str, found: Found) -> None:
    """Name the nearest key: of this block, else of any."""
    elsewhere = [each for each in all_paths() if each.rpartition(".")[2] == name]
    here = {each.removeprefix(block.place) for each in all_paths() if each.startswith(block.place)}
    near = difflib.get_close_matches(name, [each for each in here if "." not in each], 1, 0.6)
    if elsewhere:
        expected = f"it as {elsewhere[0]}"
    elif near:
        expected = f"{block.place}{near[0]}"
    else:
        expected = "a key that `python -m deepspeed_ext.config keys` lists"
    found.fail(path, "is no key", expected)
    found.rows.append(Row(path, value, f"refused: expected {expected}"))


def _rename(zero: dict[str, Any], found: Found) -> None:
    """Move what old names say to the keys that have it now."""
    for name, block, key, means in (
        ("cpu_offload", "offload_optimizer", "device", "cpu"),
        ("cpu_offload_params", "offload_param", "device", "cpu"),
        ("cpu_offload_use_pin_memory", "offload_optimizer", "pin_memory", True),
    ):
        if name not in zero:
            continue
        path = found.paths[f"zero_optimization.{name}"]
        new = f"zero_optimization.{block}.{key}"
        found.warnings.append(f"config: {path} is an old name; use {new}")
        try:
            is_on = bool(FLAG.read(zero[name]))
        except ValueError:
            continue  # the tree says what is wrong
        value = zero.setdefault(block, {}).setdefault(key, means) if is_on else means
        if str(value).strip().lower() != str(means).lower():
            found.fail(new, f"is {shown(value)}", f"{shown(means)}, as {path} is true")
