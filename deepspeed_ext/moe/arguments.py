"""What layers of experts refuse of their arguments."""

import math
from numbers import Integral, Real

_MOST_EXPERTS = 1024  # of moe_route


def check_whole(layer: str, **values: object) -> None:
    """Refuse what is no whole number.

    Args:
        layer: what an error calls it.
        values: by the names of arguments.
    """
    for name, value in values.items():
        if not isinstance(value, Integral):  # as those of numpy are
            raise TypeError(f"{layer}: {name} is {value!r}, expected a whole number")


def check_choices(layer: str, *, num_experts: int, **counts: int) -> None:
    """Refuse numbers of experts and choices that there cannot be.

    Args:
        layer: what an error calls it.
        num_experts: of all processes.
        counts: by the names of arguments; the last one, of choices, is up to num_experts.
    """
    counts = {"num_experts": num_experts, **counts}
    check_whole(layer, **counts)
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{layer}: {name} is {count}, expected at least 1")
    if num_experts > _MOST_EXPERTS:
        raise ValueError(f"{layer}: num_experts is {num_experts}, expected at most {_MOST_EXPERTS}")
    name, choices = counts.popitem()
    if choices > num_experts:
        raise ValueError(f"{layer}: {name} is {choices}, expected at most {num_experts}, all")


def check_room(layer: str, *, min_capacity: int, **factors: float) -> None:
    """Refuse what no capacity is made of.

    Args:
        layer: what an error calls it.
        min_capacity: of an expert.
        factors: by the names of arguments.
    """
    check_whole(layer, min_capacity=min_capacity)
    for name, value in (*factors.items(), ("min_capacity", min_capacity)):
        if not isinstance(value, Real):
            raise TypeError(f"{layer}: {name} is {value!r}, expected a number")
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{layer}: {name} is {value}, expected a number from 0")
