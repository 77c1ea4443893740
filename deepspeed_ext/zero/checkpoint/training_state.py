"""Model and optimizer as flat state dicts, by names that say nothing of processes or wrappers."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.state_intake import StateIntake
from deepspeed_ext.ops.optimizers.state_formats import join_float32
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import is_same_memory
from deepspeed_ext.optim.checks import title_of_state
from deepspeed_ext.optim.foreign_state import refused_by_torch
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.torch_internals.modules import copy_metadata
from deepspeed_ext.zero.checkpoint.master_weights import MasterWeights
from deepspeed_ext.zero.checkpoint.storage import Part, Reader
from deepspeed_ext.zero.names import by_plain_name, plain_name

_log = logging.getLogger("deepspeed_ext")
MODEL = "model."
OPTIMIZER = "optimizer."
COMMON = "common"  # what a checkpoint says once
Group = dict[str, Any]


class TrainingReader(Reader):
    """A reader to whom names in models are plain, also in checkpoints of before they were."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds."""
        metadata = super().read_metadata(*args, **kwargs)
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = {_in_checkpoint(n): entry for n, entry in entries.items()}
        metadata.storage_data = {
            MetadataIndex(_in_checkpoint(index.fqn), index.offset): piece
            for index, piece in metadata.storage_data.items()
        }
        return metadata


def _in_checkpoint(name: str) -> str:
    return plain_name(name) if name.startswith((MODEL, OPTIMIZER)) else name


def tensors_of(
    op: str, model: nn.Module, *, with_buffers: bool = True, with_frozen: bool = True
) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and the buffers that a state dict has, by name.

    Args:
        op: for the text of an error.
        model: with names that are plain here.
        with_buffers: also plain ones, which each process has of its own.
        with_frozen: also parameters that need no gradient.
    """
    params = {n: p for n, p in model.named_parameters() if with_frozen or p.requires_grad}
    found: dict[str, Tensor] = by_plain_name(op, dict(params))
    saved = set(map(plain_name, model.state_dict()))
    buffers = by_plain_name(op, dict(model.named_buffers()))
    found.update(
        {n: b for n, b in buffers.items() if n in saved and (with_buffers or is_dtensor(b))}
    )
    return {MODEL + name: _detached(tensor) for name, tensor in found.items()}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, with those that `tensors_of` has."""
    kept = {id(param): plain_name(name) for name, param in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    names = {plain_name(name): kept[id(param)] for name, param in named}
    return {name: first for name, first in names.items() if name != first}


def extra_of(model: nn.Module) -> dict[str, Any]:
    """Return what a state dict has beside parameters and buffers, such as get_extra_state's."""
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    tensors += model.named_buffers(remove_duplicate=False)
    known = {plain_name(name) for name, _ in tensors}
    memory = {_memory(tensor) for _, tensor in tensors} - {0}  # under whatever names
    return {
        plain_name(name): value
        for name, value in model.state_dict().items()
        if plain_name(name) not in known
        and not (isinstance(value, Tensor) and _memory(value) in memory)
    }


def check_extra(
    op: str, model: nn.Module, saved: Mapping[str, Any] | None, *, strict: bool = True
) -> None:
    """Refuse a checkpoint whose model had extra state of other names; one of before says none."""
    mine = extra_of(model)
    if saved is None:
        if mine:
            _log.warning("%s: the checkpoint is of before %s was saved", op, sorted(mine))
        return
    for name in sorted(saved.keys() ^ mine.keys()) if strict else ():
        whose = "the model" if name in mine else "the checkpoint"
        raise ValueError(f"{op}: only {whose} has the extra state {name!r}, expected the same")


def take_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give a model what `extra_of` returned."""
    if not extra:
        return
    own = model.state_dict()
    state = type(own)((name, extra[plain_name(name)]) for name in own if plain_name(name) in extra)
    copy_metadata(state, own)
    model.load_state_dict(state, strict=False)


def _memory(tensor: Tensor) -> int:
    """Return where a tensor lies, 0 if nowhere."""
    part = local(tensor)
    return part.data_ptr() if part.numel() else 0


def _detached(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory and version, so that optimizers notice what is read."""
    part = local(tensor).detach()
    return spread(part, tensor) if is_dtensor(tensor) else part


def state_of(
    op: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: dict[str, Callable[[], Iterable[Tensor]]] | None = None,
) -> tuple[dict[str, Tensor], list[Group]]:
    """Return the state tensors of an optimizer by name, and its groups with names for parameters.

    Args:
        op: for the texts of errors.
        model: that has the parameters.
        optimizer: whose state it is.
        parts: gets what makes tensors part by part, which are on meta then; None: all are made now.

    Raises:
        ValueError: it has a parameter that the model has not.
        TypeError: it has state that is no tensor.
    """
    made: Mapping[tuple[int, str], Callable[[], Iterable[Tensor]]] = {}
    if parts is not None and type(optimizer) is OffloadOptimizer:
        packed, made = optimizer.state_dict_in_parts()
    else:
        packed = optimizer.state_dict()
    names = names_in(op, model, optimizer)
    flat = [name for group in names for name in group]
    tensors = {}
    for number, entry in packed["state"].items():
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{op}: state {key!r} of {flat[number]!r} is a {type(value).__name__}, expected"
                    " a tensor"
                )
            full = f"{OPTIMIZER}{flat[number]}.{key}"
            tensors[full] = value.detach()
            if parts is not None and (number, key) in made:
                parts[full] = made[number, key]
    pairs = zip(packed["param_groups"], names, strict=True)
    return tensors, [{**group, "params": inside} for group, inside in pairs]


def check_model(op: str, model: nn.Module, metadata: Metadata, *, strict: bool = True) -> None:
    """Refuse a checkpoint of another model before anything is changed.

    Args:
        op: for the texts of errors.
        model: that is to take it.
        metadata: of the checkpoint.
        strict: False: one may have what the other has not; what both have has one shape.
    """
    saved, mine = metadata.state_dict_metadata, tensors_of(op, model)
    theirs = [name for name in saved if name.startswith(MODEL)]
    if not strict:
        missing = [name.removeprefix(MODEL) for name in mine if name not in saved]
        unused = [name.removeprefix(MODEL) for name in theirs if name not in mine]
        mine = {name: tensor for name, tensor in mine.items() if name in saved}
        theirs = []
        for names, what in ((missing, "stay as they are"), (unused, "are not read")):
            if names:
                _log.warning("%s: %d tensors %s, such as %r", op, len(names), what, names[0])
    for name in (*mine, *theirs):
        shown = repr(name.removeprefix(MODEL))
        if name not in saved:
            raise ValueError(
                f"{op}: the checkpoint has no {shown}, expected all that the model has; without"
                " strict it stays as it is"
            )
        if name not in mine:
            raise ValueError(f"{op}: the checkpoint has {shown}, expected what the model has only")
        entry = saved[name]
        shape = list(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != list(mine[name].shape):
            raise ValueError(
                f"{op}: {shown} has shape {shape} in the checkpoint, expected"
                f" {list(mine[name].shape)}"
            )


class Targets:
    """Where the tensors of a checkpoint are to be read, and how an optimizer takes its state.

    Attributes:
        tensors: to be read, by name in the checkpoint.
        again: likewise, after those: what is wanted in two places.

    Args:
        op: for the texts of errors.
        model: whose tensors are overwritten in place.
        optimizer: None to leave its state in the checkpoint.
        groups: as `state_of` returned them when it was saved.
        metadata: of the checkpoint.
        strict: of `check_model`.
        has_masters: whose master weights are read where its other state is not; None: nobody's.

    Raises:
        ValueError: the checkpoint is of another model, or of an optimizer with other groups.
    """

    def __init__(
        self,
        op: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        groups: list[Group],
        metadata: Metadata,
        *,
        strict: bool = True,
        has_masters: torch.optim.Optimizer | None = None,
    ) -> None:
        self._saved = metadata.state_dict_metadata
        check_model(op, model, metadata, strict=strict)
        tensors = tensors_of(op, model)
        self.tensors = {name: tensor for name, tensor in tensors.items() if name in self._saved}
        self._optimizer = optimizer
        self._intake: StateIntake | None = None
        self._untaken: dict[str, int] = {}  # parameters whose state is taken one by one
        self._params = by_plain_name(op, dict(model.named_parameters()))
        self.again: dict[str, Tensor] = {}
        self._join: list[tuple[Tensor, Tensor, Tensor]] = []
        self._restore_weights()
        self._masters: MasterWeights | None = None
        if optimizer is None:
            if has_masters is not None:
                dtypes = {n: self._dtype(n) for n, e in self._saved.items() if _is_tensor(e)}
                params = self._params
                self._masters = MasterWeights(has_masters, params, dtypes, MODEL, OPTIMIZER)
                self.tensors |= self._masters.tensors
                self.again |= self._masters.again
            return
        names = names_in(op, model, optimizer)
        self._groups = _ordered(op, groups, names)
        for group, mine in zip(self._groups, optimizer.param_groups, strict=True):
            if group.keys() == {"params"}:  # of DeepSpeed's elastic checkpoints
                group |= {key: value for key, value in mine.items() if key != "params"}
        flat = [name for group in names for name in group]
        keys: dict[str, list[str]] = {}
        for full in self._saved:
            if full.startswith(OPTIMIZER):
                name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(name, []).append(key)
        entries: dict[Tensor, dict[str, Any]] = {
            self._params[name]: self._described(name, keys[name]) for name in keys
        }
        _check_given(op, optimizer, entries, self._groups)
        self._own = _state_in_place(optimizer, [self._params[name] for name in keys])
        if isinstance(optimizer, OffloadOptimizer):
            self._intake = optimizer.state_intake()
        self._state = {
            number: self._entry(name, keys[name])
            for number, name in enumerate(flat)
            if name in keys
        }
        if self._intake is not None:
            numbers = {name: number for number, name in enumerate(flat) if name in keys}
            names_of: dict[Tensor, str] = {self._params[name]: name for name in numbers}
            ordered = self._intake.ordered(names_of)
            self._untaken = {names_of[param]: numbers[names_of[param]] for param in ordered}

    def parts(self) -> list[Part]:
        """Return what of `tensors` is to be there together, and is taken then."""
        if self._masters is not None:
            return [*self._masters.parts(again=False)]
        return [
            Part(
                [f"{OPTIMIZER}{name}.{key}" for key in self._state[number]],
                [] if MODEL + name in self.again else self._buffers_of(name),
                partial(self._take_state, name),
            )
            for name, number in self._untaken.items()
        ]

    def parts_again(self) -> list[Part]:
        """Return the same of `again`."""
        if self._masters is not None:
            return [*self._masters.parts(again=True)]
        return [
            Part([MODEL + name], [], partial(self._take_state, name, has_all=True))
            for name in self._untaken
            if MODEL + name in self.again
        ]

    def _buffers_of(self, name: str) -> list[Tensor]:
        """Return what the state of a parameter is read to that is not where it is to be."""
        entry, own = self._state[self._untaken[name]], self._own[self._params[name]]
        return [
            local(value)
            for key, value in entry.items()
            if key not in own or not is_same_memory(value, local(own[key]))
        ]

    def _take_state(self, name: str, *, has_all: bool = False) -> None:
        """Let an optimizer have the state of a parameter, of which all was read.

        What was not read to where it is to be, in memory, is there no longer than that takes.
        """
        number, param = self._untaken[name], self._params[name]
        entry = self._state[number]
        assert self._intake is not None
        if MODEL + name in self.again and not has_all:
            self._intake.take(param, self._own[param])  # more of it is read again
            return
        taken = self._intake.take(param, entry)
        del self._untaken[name]
        # Of what it has made others of, nothing is left.
        kept = {k: v for k, v in entry.items() if k not in (*taken, MASTER, REMAINDER)}
        self._state[number] = {**kept, **taken}
        for key in entry.keys() - kept.keys():
            if key not in taken or not is_same_memory(entry[key], local(taken[key])):
                local(entry[key]).untyped_storage().resize_(0)

    def take(self) -> None:
        """Put what was read to where it belongs."""
        if self._intake is not None:
            for name in list(self._untaken):
                self._take_state(name, has_all=True)
            self._intake.finish()
        if self._masters is not None:
            self._masters.finish()
        for weight, upper, lower in self._join:
            weight.copy_(join_float32(local(upper), local(lower).to(torch.int16)))
        if self._optimizer is not None:
            self._optimizer.load_state_dict({"state": self._state, "param_groups": self._groups})

    def _entry(self, name: str, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the state of a parameter, each tensor where it is to be read."""
        param = self._params[name]
        own = self._own.get(param, {})
        entry = {}
        for key in keys:
            if param.dtype == torch.float32 and key in (MASTER, REMAINDER):
                continue
            entry[key] = self._read(f"{OPTIMIZER}{name}.{key}", param, own.get(key))
        full = MODEL + name
        was_master = full in self._saved and self._dtype(full) == torch.float32
        if param.dtype != torch.float32 and was_master:
            # Weights that were their own master weights are read once more, as such.
            master = own.get(MASTER)
            master = self._like(param, torch.float32) if master is None else _detached(master)
            entry[MASTER] = self.again[full] = master
        return entry

    def _described(self, name: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return the state of a parameter on meta."""
        found = {}
        for key in keys:
            entry = self._saved[f"{OPTIMIZER}{name}.{key}"]
            assert isinstance(entry, TensorStorageMetadata)
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        return found

    def _restore_weights(self) -> None:
        """Read float32 weights from the master weights of those that were saved in 16 bits."""
        for name, param in self._params.items():
            full = MODEL + name
            if param.dtype != torch.float32 or full not in self._saved:
                continue
            if self._dtype(full) == torch.float32:
                continue
            master, lower = (f"{OPTIMIZER}{name}.{key}" for key in (MASTER, REMAINDER))
            if master in self._saved:
                self.tensors[master] = self.tensors.pop(full)
            elif lower in self._saved and self._dtype(full) == torch.bfloat16:
                upper = self.tensors[full] = self._like(param, torch.bfloat16)
                self._join.append((local(param).detach(), upper, self._read(lower, param)))

    def _read(self, full: str, param: Tensor, own: object = None) -> Tensor:
        entry = self._saved[full]
        assert isinstance(entry, TensorStorageMetadata)
        kind = (entry.size, entry.properties.dtype)
        if isinstance(own, Tensor) and (own.shape, own.dtype) == kind:
            made = _detached(own)
        elif entry.size == param.shape and param.dim():
            made = self._like(param, entry.properties.dtype)
        else:
            made = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        self.tensors[full] = made
        return made

    def _like(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Return undefined values that lie as a parameter does, where its state is to be."""
        on_host = isinstance(self._optimizer, OffloadOptimizer)
        part = local(param)
        made = torch.empty_like(part, dtype=dtype, device="cpu" if on_host else part.device)
        return spread(made, param) if is_dtensor(param) else made

    def _dtype(self, full: str) -> torch.dtype:
        entry = self._saved[full]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _check_given(
    op: str,
    optimizer: torch.optim.Optimizer,
    entries: Mapping[Tensor, dict[str, Any]],
    groups: list[Group],
) -> None:
    """Refuse what an optimizer will not take, or cannot step with, before anything is changed."""
    if isinstance(optimizer, OffloadOptimizer | FlatStateOptimizer):
        optimizer.check_given(entries, groups)
        return
    for param, entry in entries.items():
        reason = refused_by_torch(optimizer, entry)
        if reason:
            raise ValueError(f"{op}: {title_of_state(optimizer, param)} {reason}")


def _state_in_place(
    optimizer: torch.optim.Optimizer, params: list[Tensor]
) -> Mapping[Tensor, dict[str, Any]]:
    """Return the state of parameters, made if there is none, that can be read to where it is."""
    if not isinstance(optimizer, OffloadOptimizer | FlatStateOptimizer):
        return {}
    with torch.no_grad():
        optimizer.give_state(params)
    return {param: optimizer.state[param] for param in params}


def names_in(op: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        ValueError: it has a parameter that the model has not.
    """
    names = {param: plain_name(name) for name, param in model.named_parameters()}
    found: list[list[str]] = []
    for i, group in enumerate(optimizer.param_groups):
        found.append([])
        for j, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"{op}: optimizer has param_groups[{i}]['params'][{j}], which is no parameter"
                    " of the model, expected parameters of the model only"
                )
            found[-1].append(names[param])
    return found


def _ordered(op: str, groups: list[Group], names: list[list[str]]) -> list[Group]:
    """Return groups for an optimizer that may have the parameters of a group in another order."""
    if len(groups) != len(names):
        raise ValueError(
            f"{op}: the checkpoint has {len(groups)} groups of parameters, expected {len(names)} as"
            " the optimizer has"
        )
    made, count = [], 0
    for i, (group, mine) in enumerate(zip(groups, names, strict=True)):
        for name in sorted(set(map(plain_name, group["params"])) ^ set(mine)):
            whose = "the optimizer" if name in mine else "the checkpoint"
            raise ValueError(
                f"{op}: group {i} has {name!r} in {whose} only, expected the same parameters"
            )
        made.append({**group, "params": list(range(count, count + len(mine)))})
        count += len(mine)
    return made


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Return groups with plain numbers in the place of tensors, such as a learning rate."""
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in groups
    ]
