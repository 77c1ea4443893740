"""Names of parameters and buffers without what wrappers put into them."""

from collections.abc import Mapping
from typing import TypeVar

from deepspeed_ext.torch_internals.modules import WRAPPED

T = TypeVar("T")


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model when nothing in it is wrapped."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def by_plain_name(op: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return values by plain names.

    Args:
        op: for the text of the error.
        named: values by the names that they have in a model.

    Raises:
        ValueError: two would have the same.
    """
    plain: dict[str, T] = {}
    for name, value in named.items():
        short = plain_name(name)
        if short in plain:
            raise ValueError(
                f"{op}: model has {name!r} and another {short!r}, expected names that differ in"
                " more than what torch's wrappers put into them"
            )
        plain[short] = value
    return plain
