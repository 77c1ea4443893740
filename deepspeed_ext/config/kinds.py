"""What a key of the config is: how its value is read, and what comes of it."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, PlainValidator

if TYPE_CHECKING:
    import torch

    Dtype = torch.dtype
else:
    Dtype = object  # a config is read and checked without torch

AUTO = "auto"
HUGGING_FACE = "Trainer or accelerate"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_INFINITE = re.compile(r"\+?inf(inity)?", re.IGNORECASE)
_LONGEST = 60


class Effect(Enum):
    """What comes of a key that is accepted; the value heads its column in documents."""

    DOES = "acts"
    SO_ANYWAY = "so anyway"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Key:
    """What is known of a key beside its type and default.

    Args:
        effect: what comes of it.
        text: a clause that says what it does, or what is so whatever it says.
        older: other names of it.
        filler: who writes a value in place of "auto"; "" for the one who writes the config.
        auto_is_default: "auto" waits for nobody.
    """

    effect: Effect
    text: str
    older: tuple[str, ...] = ()
    filler: str = ""
    auto_is_default: bool = False


def does(text: str, *older: str, filler: str = "", auto_is_default: bool = False) -> Key:
    """Return a key that does something."""
    return Key(Effect.DOES, text, older, filler, auto_is_default)


def so_anyway(text: str, *older: str) -> Key:
    """Return a key that asks for what is so, whatever its value is."""
    return Key(Effect.SO_ANYWAY, text, older)


def nowhere(text: str, *older: str) -> Key:
    """Return a key that acts nowhere in DeepSpeed either, or nowhere without a part of it."""
    return Key(Effect.NOWHERE, text, older)


@dataclass(frozen=True)
class Reader:
    """Read the value of a key; pydantic calls it in place of rules of its own.

    Args:
        expected: what fits, for the error.
        convert: return the value; a ValueError or TypeError says that it does not fit.
    """

    expected: str
    convert: Callable[[Any], object]

    def read(self, value: object) -> object:
        """Return the value, or raise "is <got>, expected <want>"."""
        try:
            return self.convert(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"is {shown(value)}, expected {self.expected}") from None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return PlainValidator(self.read).__get_pydantic_core_schema__(source, handler)


def shown(value: object) -> str:
    """Return a value as JSON has it, cut where it is long."""
    text = json.dumps(thawed(value), default=str)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def number_of(value: object) -> int | float:
    """Return a number, also of a text that is one; an int where it is written as one.

    Raises:
        ValueError: it is a text that is no number, such as "nan".
        TypeError: it is something else, such as a flag.
    """
    if isinstance(value, str):
        text = value.strip()
        if _INFINITE.fullmatch(text):
            return math.inf
        if not _NUMBER.fullmatch(text):
            raise ValueError(text)
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(type(value))
    return int(value) if isinstance(value, Integral) else float(value)


def _flag(value: object) -> bool:
    if isinstance(value, str):
        value = {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.strip().lower())
    if not isinstance(value, Integral) or value not in (0, 1):  # a bool is one
        raise TypeError(type(value))
    return bool(value)


def whole(least: int, most: int | None = None) -> Reader:
    """Return the reader of whole numbers, also of 5e8 and "8"."""

    def convert(value: object) -> int:
        number = number_of(value)
        if number != int(number) or number < least or (most is not None and number > most):
            raise ValueError(value)
        return int(number)

    end = f" to {most}" if most is not None else " or more"
    return Reader(f"a whole number, {least}{end}", convert)


def number(
    least: float, most: float = math.inf, *, above: bool = False, infinite: bool = False
) -> Reader:
    """Return the reader of numbers.

    Args:
        least: the smallest that fits.
        most: the largest that fits.
        above: `least` itself does not fit.
        infinite: inf fits.
    """

    def convert(value: object) -> int | float:
        read = number_of(value)
        fits = least <= read <= most and not (above and read == least)
        if not fits or (math.isinf(read) and not infinite):
            raise ValueError(value)
        return read

    ends = f"above {least:g}" if above else f"{least:g} or more"
    ends = f"{least:g} to {most:g}" if not math.isinf(most) else ends
    return Reader(f"a number, {ends}" + (", or inf" if infinite else ""), convert)


def choice(*names: str) -> Reader:
    """Return the reader of one of some texts, in any letters."""

    def convert(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(type(value))
        found = [name for name in names if name.lower() == value.strip().lower()]
        if not found:
            raise ValueError(value)
        return str(found[0])

    return Reader("one of " + ", ".join(map(shown, names)), convert)


def _size(value: object) -> int:
    size = int(number_of(value))
    if size < 0:
        raise ValueError(value)
    return size


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(value)
    return value


def _path(value: Any) -> object:
    if value is not None and "\0" in os.fspath(value):
        raise ValueError(value)
    return value


def _texts(value: object) -> list[str]:
    """Return texts, each once, of a list or of one that stands alone."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise TypeError(type(value))
    return [*dict.fromkeys(map(_text, given))]


def _wholes(value: object) -> list[int]:
    if not isinstance(value, list | tuple):
        raise TypeError(type(value))
    numbers = [number_of(each) for each in value]
    if any(number != int(number) for number in numbers):
        raise ValueError(value)
    return [int(number) for number in numbers]


def _numbers(value: object) -> tuple[int, ...]:
    """Return whole numbers, each once."""
    read = _wholes(value)
    if min(read, default=0) < 0 or len({*read}) < len(read):
        raise ValueError(value)
    return tuple(read)


_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("bf16", "bfp16", "bfloat16"), "bfloat16"),
}


def _dtype(value: object) -> object:
    name = _DTYPES.get(str(value).removeprefix("torch.").lower())
    if name is None:
        raise ValueError(value)
    import torch

    return getattr(torch, name)


FLAG = Reader("true or false", _flag)
SIZE = Reader("a number, 0 or more", _size)  # others compute fractions; none of these acts
TEXT = Reader("a text that is not empty", _text)
TEXTS = Reader("a list of texts that are not empty", _texts)
WHOLES = Reader("a list of whole numbers", _wholes)
ANY_TEXT = Reader("a text", lambda value: _text(value) if value != "" else "")
NUMBERS = Reader("a list of different whole numbers, 0 or more", _numbers)
DTYPE = Reader('"fp32", "fp16" or "bf16"', _dtype)
PATH = Reader("the path of a folder", _path)
ANYTHING = Reader("anything", lambda value: value)


def loosely_read(value: object) -> object:
    """Return the value of an argument whose type is not known: texts that say a number or a flag
    are read, lists are read through.

    Raises:
        ValueError: it is NaN.
    """
    if isinstance(value, Mapping):
        return {name: loosely_read(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [loosely_read(each) for each in value]
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "false"):
            return word == "true"
        return number_of(value) if _NUMBER.fullmatch(word) or word == "inf" else value
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(value)
    return value


class FrozenMapping(Mapping[str, Any]):
    """A mapping that nothing changes, with tuples for lists; it may be pickled and copied.

    Args:
        values: of which all is taken over.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {name: _frozen(value) for name, value in values.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"FrozenMapping({self._values!r})"


def _frozen(value: object) -> object:
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def thawed(value: object) -> Any:
    """Return a copy of mappings and lists as dicts and lists; all else is what it is."""
    if isinstance(value, Mapping):
        return {name: thawed(each) for name, each in value.items()}
    return [thawed(each) for each in value] if isinstance(value, list | tuple) else value
