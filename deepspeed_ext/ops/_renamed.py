"""What errors say of arguments that have another name now."""

from collections.abc import Mapping
from typing import NoReturn

RENAMED = {"activations": "input_format"}


def refuse_renamed(op: str, given: Mapping[str, object]) -> NoReturn:
    """Refuse arguments that a function does not have, and say what older ones are called now.

    Args:
        op: the function, for the text.
        given: some arguments by name.

    Raises:
        TypeError: always.
    """
    for name, value in given.items():
        if name in RENAMED:
            raise TypeError(f"{op}: {name} is now {RENAMED[name]}; give {RENAMED[name]}={value!r}")
    raise TypeError(f"{op}: {next(iter(given))} is no argument")
