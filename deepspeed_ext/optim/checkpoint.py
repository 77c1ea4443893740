"""Carry state tensors through torch's load_state_dict, which would cast them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class _Hidden:
    """A tensor that torch does not recognize, and so leaves alone."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def hide_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with every state tensor hidden; a hook for load_state_dict."""
    state = {
        key: {k: _Hidden(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        if isinstance(entry, dict)
        else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def show_tensors(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return state as an optimizer keeps it, with hidden tensors themselves again."""
    shown: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in state.items():
        shown[key] = entry
        if isinstance(entry, dict):
            shown[key] = {k: v.tensor if isinstance(v, _Hidden) else v for k, v in entry.items()}
    return shown
