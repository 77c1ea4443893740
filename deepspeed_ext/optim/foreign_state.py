"""State of another class of optimizers: told by its keys, since torch's state dicts name no class.

What no class here or in torch keeps is a user's own, and is kept.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

# Keys that tell of a class, together where one alone could be anything of a user's.
_TELLING = (
    *(("exp_avg",), ("exp_avg_sq",), ("max_exp_avg_sq",), ("exp_inf",), ("mu_product",)),
    *(("momentum_buffer",), ("sum",), ("square_avg",), ("acc_delta",), ("grad_avg",)),
    *(("prev", "step_size"), ("ax", "eta", "mu"), ("row_var", "col_var")),
)
_ADAM = ("step", "exp_avg", "exp_avg_sq")
# What state of torch's classes always has, and what it may have.
_OF_TORCH: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ASGD": (("step", "eta", "mu", "ax"), ()),
    "Adadelta": (("step", "square_avg", "acc_delta"), ()),
    "Adafactor": (("step",), ("row_var", "col_var", "variance")),
    "Adagrad": (("step", "sum"), ()),
    "Adam": (_ADAM, ("max_exp_avg_sq",)),
    "AdamW": (_ADAM, ("max_exp_avg_sq",)),
    "Adamax": (("step", "exp_avg", "exp_inf"), ()),
    "Muon": (("momentum_buffer",), ()),
    "NAdam": ((*_ADAM, "mu_product"), ()),
    "RAdam": (_ADAM, ()),
    "RMSprop": (("step", "square_avg"), ("momentum_buffer", "grad_avg")),
    "Rprop": (("step", "prev", "step_size"), ()),
    "SGD": ((), ("momentum_buffer",)),
    "SparseAdam": (_ADAM, ()),
}


def refused_key(
    entry: Mapping[str, Any], needed: Collection[str], known: Collection[str]
) -> str | None:
    """Return why state with these keys is not that of a class, in words that follow its name.

    Args:
        entry: of a parameter.
        needed: keys that state of the class always has.
        known: all that it may have.
    """
    keys = {key for key, value in entry.items() if value is not None}
    foreign = {key for telling in _TELLING if keys.issuperset(telling) for key in telling}
    foreign -= set(known)
    if foreign:
        return (
            f"has keys {sorted(map(str, entry))}, expected none of {sorted(foreign)}, which another"
            " class of optimizers keeps; load it into the one that saved it"
        )
    for key in needed:
        if key not in keys:
            return f"has keys {sorted(map(str, entry))}, expected {key} among them"
    return None


def refused_by_torch(optimizer: torch.optim.Optimizer, entry: Mapping[str, Any]) -> str | None:
    """Return why this is not state of torch's class; None also for classes of anybody else."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _OF_TORCH and kind.__module__.startswith("torch.optim."):
            needed, more = _OF_TORCH[kind.__name__]
            return refused_key(entry, needed, (*needed, *more))
    return None
