"""What the model files say: shapes in their order, frozen parameters, buffers, and the run."""

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.modules import EXTRA_STATE
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields, is_same, shape_of
from deepspeed_ext.zero.deepspeed_folders.placing import part_of

# What DeepSpeed itself keeps at the top; all else is the client's state.
OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"),
    *("csr_tensor_module_names", "num_experts"),
}
PASSED_ON = ("lr_scheduler", "data_sampler", "random_ltd")
_COUNTS = ("global_steps", "global_samples", "skipped_steps")
Fragments = tuple[Tensor, ...]


@dataclass
class ModelFile:
    """What there is beside the optimizer's state.

    Args:
        path: of the file.
        groups: shapes by name, for each group of parameters (stage 3: for each sub-group); None in
            stage 0.
        version: of DeepSpeed; None: the file does not say.
        processes: that wrote the checkpoint; likewise.
        tensors: frozen parameters, buffers and, in stage 0, all weights: the parts of each, which
            lie one after another, and its shape.
        cast: trained parameters in the dtype of the model, where the file has them.
        extra: what a state dict has beside parameters and buffers.
        client: what the client saved, and what a run goes on with.
        ties: names of parameters that are others, with the names of those.
        buffers: names of those that a state dict has.
        optimizer: its state in stage 0; else None.
    """

    path: Path
    groups: list[dict[str, torch.Size]] | None
    version: str | None
    processes: int | None
    tensors: dict[str, tuple[torch.Size, Fragments]] = field(default_factory=dict)
    cast: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    optimizer: Any = None


def model_of(files: list[Fields]) -> ModelFile:
    """Return what the model files of a checkpoint say, but for module; see `add_module`.

    Args:
        files: one, or one of each process.

    Raises:
        ValueError: they are not of one run, or break a rule of their format.
    """
    first = files[0]
    for other in files[1:]:
        check_same_run(first, other, ("param_shapes", "frozen_param_shapes"))
    shapes = first.get("param_shapes", list, dict, default=None)
    listed = [shapes] if isinstance(shapes, dict) else shapes  # one dict before 0.4
    groups = None
    if listed is not None:
        groups = [first.shapes("param_shapes", group) for group in listed]
    version = first.get("ds_version", str, default=None)
    model = ModelFile(first.path, groups, version, first.get("dp_world_size", int, default=None))
    model.ties = {
        first.text(name): first.text(kept)
        for name, kept in first.get("shared_params", dict, default={}).items()
    }
    trained: set[str] = set()
    for name in (name for group in groups or () for name in group):
        if name in trained:
            raise ValueError(f"{OP}: {first.path} has {name!r} twice in param_shapes")
        trained.add(name)
    _add_frozen(model, files, trained)
    model.buffers = {first.text(n) for n in first.get("buffer_names", list, default=[])}
    model.optimizer = first.content.get("optimizer")
    own = {key: first.get(key, int, default=None) for key in _COUNTS}
    own |= {key: first.content.get(key) for key in PASSED_ON}
    model.client = {key: value for key, value in own.items() if value is not None}
    model.client |= {k: value for k, value in first.content.items() if k not in OWN}
    return model


def check_same_run(first: Fields, other: Fields, more: tuple[str, ...] = ()) -> None:
    """Refuse files of two runs, or of two moments.

    Args:
        first, other: model files.
        more: fields that they have alike, beside those that all have.
    """
    for key in (*more, "ds_version", "dp_world_size", *_COUNTS):
        mine, theirs = first.content.get(key), other.content.get(key)
        if not is_same(mine, theirs) or not is_same(_order(mine), _order(theirs)):
            raise ValueError(
                f"{OP}: {other.path} has {theirs!r:.80} as {key!r}, expected {mine!r:.80} as"
                f" {first.path.name} has; it is of another run"
            )


def _order(shapes: Any) -> Any:
    """Return names in their order, of which plain dicts that are equal may have another."""
    if isinstance(shapes, list):
        return [_order(group) for group in shapes]
    return list(shapes) if isinstance(shapes, dict) else None


def _add_frozen(model: ModelFile, files: list[Fields], trained: set[str]) -> None:
    """Add what is in no optimizer: whole, or in stage 3 a part in each file."""
    first = files[0]
    shapes = first.shapes("frozen_param_shapes", first.get("frozen_param_shapes", dict, default={}))
    for name, shape in shapes.items():
        if name in trained:
            raise ValueError(f"{OP}: {first.path} has {name!r} as frozen and in param_shapes")
        parts = []
        for file in files:
            fragments = file.inside("frozen_param_fragments")
            parts.append(fragments.tensor(fragments.content.get(name), name).view(-1))
        wanted = shape.numel() if len(files) == 1 else part_of(shape.numel(), len(files))
        for file, part in zip(files, parts, strict=True):
            if part.numel() != wanted or part.dtype != parts[0].dtype:
                raise ValueError(
                    f"{OP}: {file.path} has {part.numel()} elements of {part.dtype} for the frozen"
                    f" {name!r}, expected {wanted} of {parts[0].dtype} for shape {list(shape)}"
                )
        model.tensors[name] = (shape, tuple(parts))


def add_module(
    model: ModelFile, file: Fields, prefix: str, trained: Container[str], has_empty: bool
) -> None:
    """Add what a state dict in a file has: weights as the model has them, buffers, extra state.

    Args:
        model: gets them.
        file: that has them.
        prefix: of their names.
        trained: names of what the optimizer has.
        has_empty: empty tensors stand for parameters, as in stage 3.

    Raises:
        ValueError: a name was there already, or is tied to one that is not.
    """
    tied: list[str] = []
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    for name, value in ((prefix + file.text(name), value) for name, value in file.content.items()):
        if name.rpartition(".")[2] == EXTRA_STATE or not isinstance(value, Tensor):
            model.extra[name] = value
            continue
        tensor = file.tensor(value, name)
        if has_empty and not tensor.numel() and name not in model.buffers:
            continue
        if name in model.cast or (prefix and name in model.tensors):
            raise ValueError(f"{OP}: {file.path} has {name!r}, which another file has, too")
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if name in trained:
            model.cast[name] = tensor
        elif name in model.ties or (tensor.numel() and key in seen and name not in model.buffers):
            model.ties.setdefault(name, seen.get(key, ""))
            tied.append(name)
        elif name not in model.tensors:
            shape = shape_of(file.path, name, tensor.shape)
            model.tensors[name] = (shape, (tensor.view(-1),))
        seen.setdefault(key, name)
    for name in tied:
        kept = model.ties[name]
        if kept not in trained and kept not in model.tensors:
            raise ValueError(
                f"{OP}: {file.path} has {name!r} tied to {kept!r}, expected that to be in the"
                " checkpoint"
            )
