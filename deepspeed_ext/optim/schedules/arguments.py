"""What the schedules take as numbers, and in which words they refuse the rest."""

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

from torch.optim import Optimizer

PerGroup = float | Sequence[float]  # one number for all groups, or one for each


class Limits(NamedTuple):
    """What a number may be, from 0 on: the largest one, and the words for it."""

    most: float
    want: str


AT_LEAST_0 = Limits(sys.float_info.max, "a finite number, at least 0")
UP_TO_1 = Limits(1.0, "0 to 1")
BELOW_1 = Limits(math.nextafter(1.0, 0.0), "at least 0 and below 1")


def number(title: str, name: str, value: object, limits: Limits = AT_LEAST_0) -> float:
    """Return a number within its limits, or raise TypeError or ValueError."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{title}: {name} is {value!r}, expected a number")
    found = float(value)
    if not 0 <= found <= limits.most:  # as NaN
        raise ValueError(f"{title}: {name} is {value}, expected {limits.want}")
    return found


def whole(title: str, name: str, value: object, least: int) -> int:
    """Return a whole number, also one that JSON wrote as 1e4, or raise TypeError or ValueError.

    None, which is null in JSON, is a ValueError, as in DeepSpeed's schedules.
    """
    if value is None:
        raise ValueError(f"{title}: {name} is None, expected a whole number, at least {least}")
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{title}: {name} is {value!r}, expected a whole number")
    found = float(value)
    if not (found.is_integer() and found >= least):
        raise ValueError(f"{title}: {name} is {value}, expected a whole number, at least {least}")
    return int(found)


def flag(title: str, name: str, value: object) -> bool:
    """Return a bool, or raise TypeError: any text would be on."""
    if not (isinstance(value, int) and value in (0, 1)):  # a bool is an int
        raise TypeError(f"{title}: {name} is {value!r}, expected a bool")
    return bool(value)


def per_group(
    title: str, name: str, value: object, groups: int, limits: Limits = AT_LEAST_0
) -> PerGroup:
    """Return a number, or a tuple of one for each group; raise TypeError or ValueError."""
    if not isinstance(value, (list, tuple)):
        return number(title, name, value, limits)
    found = tuple(number(title, f"{name}[{i}]", each, limits) for i, each in enumerate(value))
    spread(title, name, found, groups)
    return found


def spread(title: str, name: str, values: PerGroup, groups: int) -> Sequence[float]:
    """Return one number for each group, or raise ValueError if a list of them is not as long."""
    if not isinstance(values, Sequence):
        return (values,) * groups
    if len(values) != groups:
        raise ValueError(
            f"{title}: {name} has {len(values)} values, expected {groups}, one for each group; "
            "one number is for all groups, those that are added later too"
        )
    return values


def check_order(title: str, low: tuple[str, PerGroup], high: tuple[str, PerGroup]) -> None:
    """Raise ValueError if a number that is to be the lower one is above the other in a group."""
    (low_name, lows), (high_name, highs) = low, high
    groups = max(len(each) if isinstance(each, Sequence) else 1 for each in (lows, highs))
    both = zip(
        spread(title, low_name, lows, groups), spread(title, high_name, highs, groups), strict=True
    )
    for least, most in both:
        if least > most:
            raise ValueError(
                f"{title}: {low_name} is {least}, expected at most {high_name}, {most}"
            )


def check_optimizer(title: str, optimizer: object) -> Optimizer:
    """Return the optimizer, or raise TypeError if it is none of torch's kind."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"{title}: optimizer is a {kind}, expected a torch.optim.Optimizer")
    return optimizer


def own_lrs(optimizer: Optimizer) -> list[float]:
    """Return the lr that each group has by itself: what torch's schedulers keep as initial_lr."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
