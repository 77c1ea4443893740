"""Universal folders, as ds_to_universal makes them: of each parameter a folder, of each key a file.

See: DeepSpeed 0.19, checkpoint/ds_to_universal.py. Of stages 1 and 2 a file has {"param": tensor}
of the parameter's shape, and step.pt a number; of stage 3 it has a flat tensor, and the steps are
in the state that optimizer_state.pt keeps.
"""

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy, cut, lazy, lazy_number
from deepspeed_ext.zero.deepspeed_folders.model_file import ModelFile
from deepspeed_ext.zero.deepspeed_folders.optimizer_files import (
    groups_of_flats,
    number_of,
    options_of_groups,
    scaler_of,
)
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields, read_object, read_pickle
from deepspeed_ext.zero.deepspeed_folders.shard_files import PARAMETERS, REST

WEIGHT, STEP = "fp32", "step"
_OF_STAGE_3 = "optimizer_state_dict"


class UniversalFolder:
    """What a universal folder has beside its model file.

    Args:
        folder: of the checkpoint.
        model: with the names and shapes of what was trained.

    Attributes:
        weights: what was trained, by name.
        state: of the optimizer, by names and keys.
        groups: of parameters: names as "params", and options.
        scaler: as in OptimizerFiles.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: there is a folder of a parameter that the model file does not name.
    """

    def __init__(self, folder: Path, model: ModelFile) -> None:
        assert model.groups is not None
        self._home = folder / PARAMETERS
        rest = Fields(self._home / REST, read_pickle(self._home / REST), "")
        self.scaler = scaler_of(rest)
        groups = options_of_groups(rest, rest.get("param_groups", list))
        group_of = list(range(len(model.groups)))
        entries: list[dict[Any, Any]] = [{} for _ in group_of]
        if _OF_STAGE_3 in rest:
            group_of = groups_of_flats(rest, groups, len(model.groups))
            state = rest.inside(_OF_STAGE_3).inside("state")
            entries = [state.inside(i).content if i in state else {} for i in group_of]
        elif len(groups) != len(model.groups):
            raise ValueError(
                f"{OP}: {rest.path} has {len(groups)} groups, expected {len(model.groups)} as"
                f" {model.path.name} has"
            )
        self.groups = [{**group, "params": list[str]()} for group in groups]
        self.weights: dict[str, Lazy] = {}
        self.state: dict[str, dict[str, Lazy]] = {}
        for flat, shapes in enumerate(model.groups):
            step = entries[flat].get(STEP, self.groups[group_of[flat]].get(STEP))
            for name, shape in shapes.items():
                self._add(name, shape, None if step is None else number_of(rest, step, STEP))
                self.groups[group_of[flat]]["params"].append(name)
        for group in self.groups:
            group.pop(STEP, None)

    def _add(self, name: str, shape: torch.Size, step: float | None) -> None:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"{OP}: {self._home} has the name {name!r:.80}, expected no path")
        home = self._home / name
        if not (home / f"{WEIGHT}.pt").exists():
            raise FileNotFoundError(
                errno.ENOENT, f"{OP}: {home} has no {WEIGHT}.pt, expected one of each parameter"
            )
        self.weights[name] = _of_file(home / f"{WEIGHT}.pt", shape)
        state = {
            path.stem: _of_file(path, shape)
            for path in sorted(home.glob("*.pt"))
            if path.stem not in (WEIGHT, STEP)
        }
        if (home / f"{STEP}.pt").exists():
            path = home / f"{STEP}.pt"
            step = number_of(Fields(path, {}), read_object(path), STEP)
        if state and step is None:
            raise ValueError(f"{OP}: {home} has no {STEP}.pt, expected one, or a step in {REST}")
        if state and step is not None:
            self.state[name] = {**state, STEP: lazy_number(step)}

    def check_names(self, model: ModelFile) -> None:
        """Refuse parameters that nothing names; the others' weights are in the model file, too."""
        known = self.weights.keys() | model.tensors.keys() | model.ties.keys() | model.extra.keys()
        for path in sorted(self._home.iterdir()):
            if path.name != REST and path.name not in known:
                raise ValueError(
                    f"{OP}: {path} is of no parameter of {model.path.name}, expected those only"
                )


def _of_file(path: Path, shape: torch.Size) -> Lazy:
    return lazy(shape, torch.float32, partial(_read, path, shape))


def _read(path: Path, shape: torch.Size, begin: int, end: int) -> Iterator[Tensor]:
    content = read_object(path)
    fields = Fields(path, content if isinstance(content, dict) else {"param": content})
    found = fields.tensor(fields.content.get("param"), "param")
    if found.dtype != torch.float32 or found.shape not in (shape, (shape.numel(),)):
        raise ValueError(
            f"{OP}: {path} has {found.dtype} of shape {list(found.shape)}, expected float32 of"
            f" {list(shape)} as in the model file"
        )
    return cut([found.view(-1)], begin, end)
