"""Carry state through torch's load_state_dict as it is; torch would cast its tensors."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


class _Hidden:
    """A value in a shape that torch does not recognize, and so leaves alone."""

    def __init__(self, value: object) -> None:
        self.value = value


def hide_values(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with all state of parameters hidden; a load_state_dict hook."""
    state = {
        key: {k: _Hidden(v) for k, v in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def show_values(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return state as an optimizer keeps it, with hidden values themselves again."""
    shown: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in state.items():
        shown[key] = entry
        if isinstance(entry, dict):
            shown[key] = {k: v.value if isinstance(v, _Hidden) else v for k, v in entry.items()}
    return shown
