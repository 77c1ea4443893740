"""WholeState: the optimizer's state of stage 0, which the model file has, without names.

See: DeepSpeed 0.19, runtime/fp16/fused_optimizer.py and unfused_optimizer.py: in 16 bits they keep
float32 weights, a flat tensor for each group or a tensor for each parameter, around a state dict of
torch's; in float32 there is that only.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy, cut, lazy, lazy_number
from deepspeed_ext.zero.deepspeed_folders.model_file import ModelFile
from deepspeed_ext.zero.deepspeed_folders.optimizer_files import (
    number_of,
    options_of_groups,
    scaler_of,
)
from deepspeed_ext.zero.deepspeed_folders.pickles import (
    OP,
    DynamicScaler,
    Fields,
    StaticScaler,
)
from deepspeed_ext.zero.names import plain_name

_INNER, _FLAT, _EACH = "optimizer_state_dict", "fp32_groups_flat", "fp32_groups"
Names = Sequence[Sequence[str]]  # of the parameters of each group, as an optimizer here has them


class WholeState:
    """The state of an optimizer that was not sharded.

    Args:
        model: whose `optimizer` it is; its `tensors` have been added.
        names: None: a single group has all parameters of the module, in their order.

    Attributes:
        weights: in float32, of a run in 16 bits, by name.
        state: by names and keys.
        groups: names as "params", and options.
        scaler: as in OptimizerFiles.

    Raises:
        ValueError: it is not what such an optimizer keeps, or not of these parameters.
    """

    def __init__(self, model: ModelFile, names: Names | None) -> None:
        self._model = model
        outer = Fields(model.path, model.optimizer, "optimizer")
        self._inner = outer.inside(_INNER) if _INNER in outer else outer
        groups = options_of_groups(self._inner, self._inner.get("param_groups", list))
        indices = [Fields(model.path, g, "param_groups").get("params", list) for g in groups]
        self._named = self._checked_names(names, indices, is_flat=_FLAT in outer)
        self.weights: dict[str, Lazy] = {}
        self.state: dict[str, dict[str, Lazy]] = {}
        self.groups: list[dict[str, Any]] = [
            {**{k: v for k, v in group.items() if k != "step"}, "params": mine}
            for group, mine in zip(groups, self._named, strict=True)
        ]
        flats = outer.tensors(_FLAT) if _FLAT in outer else None
        each = outer.get(_EACH, list, default=[[]] * len(groups))
        for i, mine in enumerate(self._named):
            entries = [self._entry(index, groups[i]) for index in indices[i]]
            if flats is not None:
                self._add_flat(i, mine, flats, entries)
                continue
            for j, (name, entry) in enumerate(zip(mine, entries, strict=True)):
                if _EACH in outer:
                    value = each[i][j] if len(each) > i and len(each[i]) > j else None
                    weight = outer.tensor(value, f"{_EACH}[{i}][{j}]")
                    self.weights[name] = self._whole(name, "the weight", weight)
                self._add(name, {k: self._whole(name, k, v) for k, v in entry.items()})
        self.scaler = _scaler(outer)

    def _checked_names(
        self, names: Names | None, indices: list[list[Any]], is_flat: bool
    ) -> list[list[str]]:
        """Return the names in the file of the parameters of each group."""
        model = self._model
        known = {plain_name(n): n for n in model.tensors if n not in model.buffers}
        if names is None:
            if len(indices) != 1:
                raise ValueError(
                    f"{OP}: {model.path} is of stage 0 with {len(indices)} groups, whose files do"
                    " not name what state belongs to, expected one group; load it by zero.load into"
                    " an optimizer with the same groups"
                )
            names = [list(known)]
        for mine, numbers in zip(names, indices, strict=False):
            for name in mine:
                if name not in known:
                    raise ValueError(
                        f"{OP}: {model.path} has no weight {name!r}, expected those of the"
                        " optimizer here"
                    )
            if not is_flat and len(mine) != len(numbers):
                raise ValueError(
                    f"{OP}: {model.path} has state for {len(numbers)} parameters of a group,"
                    f" expected {len(mine)}"
                )
        if len(names) != len(indices):
            raise ValueError(
                f"{OP}: {model.path} has {len(indices)} groups, expected {len(names)} as the"
                " optimizer here has"
            )
        return [[known[name] for name in mine] for mine in names]

    def _entry(self, index: object, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, with the step of its group if it has none."""
        state = self._inner.inside("state")
        entry = dict(state.inside(index).content) if index in state else {}
        if entry and "step" in group:
            entry.setdefault("step", group["step"])
        return {str(key): value for key, value in entry.items() if value is not None}

    def _whole(self, name: str, key: str, value: object) -> Lazy:
        if not isinstance(value, Tensor) or value.dim() == 0 or key == "step":
            return lazy_number(number_of(self._inner, value, key))
        shape = self._model.tensors[name][0]
        if value.shape != shape:
            raise ValueError(
                f"{OP}: {self._model.path} has shape {list(value.shape)} for {key} of {name!r},"
                f" expected {list(shape)}; it is of another parameter"
            )
        flat = self._inner.tensor(value, key).view(-1)
        return lazy(shape, flat.dtype, partial(cut, [flat]))

    def _add_flat(
        self, group: int, names: list[str], flats: list[Tensor], entries: list[dict[str, Any]]
    ) -> None:
        """Cut the flat tensors of a group."""
        shapes = {name: self._model.tensors[name][0] for name in names}
        total = sum(shape.numel() for shape in shapes.values())
        if len(flats) <= group or len(entries) != 1:
            raise ValueError(
                f"{OP}: {self._model.path} has {len(flats)} flat weights, expected one for a group"
            )
        whole = {_FLAT: flats[group], **entries[0]}
        begin = 0
        for name, shape in shapes.items():
            found: dict[str, Lazy] = {}
            for key, value in whole.items():
                if not isinstance(value, Tensor) or value.dim() == 0 or key == "step":
                    found[key] = lazy_number(number_of(self._inner, value, key))
                    continue
                flat = self._inner.flat(value, key)
                if flat.numel() != total:
                    raise ValueError(
                        f"{OP}: {self._model.path} has {flat.numel()} elements of {key} in group"
                        f" {group}, expected {total} for its parameters"
                    )
                part = flat[begin : begin + shape.numel()]
                found[key] = lazy(shape, flat.dtype, partial(cut, [part]))
            self.weights[name] = found.pop(_FLAT)
            self._add(name, found)
            begin += shape.numel()

    def _add(self, name: str, entry: dict[str, Lazy]) -> None:
        if entry:
            self.state[name] = entry


def _scaler(outer: Fields) -> dict[str, float] | None:
    if "cur_scale" not in outer:
        return None
    is_dynamic = outer.get("dynamic_loss_scale", bool, default=False)
    scaler = DynamicScaler() if is_dynamic else StaticScaler()
    scaler.saved = outer.content
    return scaler_of(Fields(outer.path, {"loss_scaler": scaler}, "optimizer"))
