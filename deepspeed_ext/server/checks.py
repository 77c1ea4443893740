"""What the settings of a server may be."""

import math
from typing import Any


def check_count(name: str, value: Any, low: int, high: int) -> None:
    """Raise unless a setting is a whole number from low to high."""
    if type(value) is not int:
        raise TypeError(f"serve: {name} is {value!r:.60}, expected an int")
    if not low <= value <= high:
        raise ValueError(f"serve: {name} is {value}, expected {low} to {high}")


def check_seconds(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless a setting is a number of seconds from low to high, of which NaN is none."""
    if type(value) not in (int, float):
        raise TypeError(f"serve: {name} is {value!r:.60}, expected a number of seconds")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"serve: {name} is {value:g}, expected {low:g} to {high:g} seconds")


def check_text(name: str, value: Any) -> None:
    """Raise unless a setting is text, of which an empty one is none: as of a variable unset."""
    if not isinstance(value, str):
        raise TypeError(f"serve: {name} is {value!r:.60}, expected text")
    if not value:
        raise ValueError(f"serve: {name} is empty, expected some text")


def check_key(value: Any) -> None:
    """Raise unless clients can give this key, which an error does not show."""
    if not isinstance(value, str):
        raise TypeError(f"serve: api_key is {type(value).__name__}, expected text, or None")
    if not value:
        raise ValueError("serve: api_key is empty, expected a key, or none for no key")
    if value.strip() != value or not (value.isascii() and value.isprintable()):
        raise ValueError(
            "serve: api_key has what no header can, expected ASCII without space at its ends"
        )
