"""Copies and pickles of an offloaded optimizer: another one is made, and loads its state."""

import copy
from typing import Any

from torch import nn

from deepspeed_ext.optim.spec import Group


def copied(
    groups: list[Group], model: nn.Module | None, memo: dict[int, Any]
) -> tuple[list[Group], nn.Module | None]:
    """Return deep copies of groups, with those of their parameters, and of the model."""
    made = [
        {k: v if k == "params" else copy.deepcopy(v, memo) for k, v in group.items()}
        for group in groups
    ]
    for group in made:
        group["params"] = [copy.deepcopy(param, memo) for param in group["params"]]
    return made, copy.deepcopy(model, memo)


def rebuilt(
    cls: type[Any],
    groups: list[Group],
    max_grad_norm: float | None,
    model: nn.Module | None,
    settings: dict[str, Any],
    state_dict: dict[str, Any],
) -> Any:
    """Make an optimizer like another one, for parameters that may be copies of its."""
    made = cls(groups, model=model, max_grad_norm=max_grad_norm, **settings)
    made.load_state_dict(state_dict)
    return made
