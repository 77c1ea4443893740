"""Carry state through torch's load_state_dict as it is; torch would cast its tensors."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optim.formats import SCALE, Parts, portable, portable_in_parts
from deepspeed_ext.optim.state_entry import StateEntry


class _Hidden:
    """The state of a parameter in a shape that torch does not recognize, and so leaves alone."""

    def __init__(self, entry: object) -> None:
        self.entry = entry


def hide_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with all state of parameters hidden; a load_state_dict hook.

    Raises:
        ValueError: it is not one of an optimizer.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            title, found = type(optimizer).__name__, sorted(map(str, state_dict))
            raise ValueError(f"{title}: state_dict has keys {found}, expected {key} among them")
    return {**state_dict, "state": {k: _Hidden(v) for k, v in state_dict["state"].items()}}


def portable_state(packed: dict[str, Any], signed: frozenset[str]) -> dict[str, Any]:
    """Return what torch packs as a state dict in a form that any sharding can load.

    Args:
        packed: options, and state by number.
        signed: keys of state that may be negative.
    """
    state = {
        key: portable(value, signed) if isinstance(value, StateEntry) else value
        for key, value in packed["state"].items()
    }
    return {**packed, "state": state}


def portable_state_in_parts(
    packed: dict[str, Any], signed: frozenset[str]
) -> tuple[dict[str, Any], dict[tuple[int, str], Parts]]:
    """Return the same, with what is converted on meta.

    Returns:
        The state dict; and, by number and key, what makes those tensors part by part.
    """
    parts: dict[tuple[int, str], Parts] = {}
    state = {}
    for number, entry in packed["state"].items():
        state[number] = dict(entry)
        for key in entry if isinstance(entry, StateEntry) else ():
            made = portable_in_parts(key, entry, signed)
            if made is not None:
                state[number][key], parts[number, key] = made
                state[number].pop(key + SCALE, None)
    return {**packed, "state": state}, parts


def show_entries(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return state as an optimizer keeps it, with what was hidden itself again."""
    shown: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in state.items():
        entry = value.entry if isinstance(value, _Hidden) else value
        shown[key] = dict(entry) if isinstance(entry, dict) else entry
    return shown
