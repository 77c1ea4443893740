"""What errors say of arguments of a wrong kind."""

import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real

from torch import Tensor

from deepspeed_ext.torch_internals.dispatch import OpOverload, schema_of

_REFUSED = re.compile(r"Expected a value of type '.+' for argument '(\w+)' but")
_WORDS = (  # how the type of an argument begins in a schema, and what that is called
    ("List[Tensor]", "a list of tensors"),
    ("List[Optional[Tensor]]", "a list of tensors, or None for some"),
    ("List[int]", "whole numbers"),
    ("Tensor", "a tensor"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("bool", "True or False"),
)


def check_kinds(name: str, **values: tuple[object, type]) -> None:
    """Refuse what is of another kind than a function reads, before it does.

    For arguments of which it reads attributes; of others the op does it. Where each call counts:
    `if type(q) is not Tensor: check_kinds("decode_attention", q=(q, Tensor))`.

    Args:
        name: of the op.
        values: its arguments by name, and the class of each.

    Raises:
        TypeError: one is not of its class.
    """
    for argument, (value, kind) in values.items():
        if not isinstance(value, kind):
            want = "a tensor" if kind is Tensor else f"a {kind.__name__}"
            raise TypeError(f"{name}: {argument} is {_told(value)}, expected {want}")


def check_whole(name: str, **values: object) -> None:
    """Refuse what is no whole number, True and False too; those of numpy are.

    Args:
        name: of a function or class.
        values: its arguments by name.

    Raises:
        TypeError: one is none.
    """
    _check(name, values, lambda value: _is_number(value, Integral), "a whole number")


def check_flags(name: str, **values: object) -> None:
    """Refuse what is neither True nor False, nor 1 or 0: a text such as "no" would count as True.

    Args:
        name: of a function or class.
        values: its arguments by name.

    Raises:
        TypeError: one is neither.
    """
    _check(
        name,
        values,
        lambda value: not isinstance(value, Tensor) and value in (True, False),
        "True or False",
    )


def check_reals(name: str, **values: object) -> None:
    """Refuse what is no number, True and False too; those of numpy are.

    Args:
        name: of a function or class.
        values: its arguments by name.

    Raises:
        TypeError: one is none.
    """
    _check(name, values, lambda value: _is_number(value, Real), "a number")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(
    name: str, values: Mapping[str, object], is_one: Callable[[object], bool], want: str
) -> None:
    for argument, value in values.items():
        if not is_one(value):
            raise TypeError(f"{name}: {argument} is {_told(value)}, expected {want}")


def told_dtype(tensor: Tensor) -> str:
    """Return what an error calls the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")


def kind_problem(op: OpOverload, values: Mapping[str, object], error: str) -> str | None:
    """Say which argument of a call that failed is of a kind that the op does not take.

    Args:
        op: that was called.
        values: its arguments by name.
        error: the text of what was raised.

    Returns:
        What is wrong, or None: another thing.
    """
    refused = _REFUSED.search(error)
    for argument in schema_of(op).arguments:
        kind, value = str(argument.type), values.get(argument.name, argument.default_value)
        is_optional = kind.startswith("Optional[")
        inner = kind.removeprefix("Optional[")
        want = next((told for begin, told in _WORDS if inner.startswith(begin)), kind)
        if value is None and not is_optional:
            return f"{argument.name} is None, expected {want}"
        if isinstance(value, (list, tuple)) and inner.startswith("List[Tensor]"):
            for i, item in enumerate(value):
                if not isinstance(item, Tensor):
                    return f"{argument.name}[{i}] is {_told(item)}, expected a tensor"
        if refused is not None and refused[1] == argument.name:
            return f"{argument.name} is {_told(value)}, expected {want}" + " or None" * is_optional
    return None


def _told(value: object) -> str:
    """Say what an argument is: itself if that is short, else its class."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
