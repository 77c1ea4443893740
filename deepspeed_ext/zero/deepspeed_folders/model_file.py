"""What the model files say: shapes in their order, frozen parameters, buffers, and the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.modules import EXTRA_STATE
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields, is_same, shape_of
from deepspeed_ext.zero.deepspeed_folders.placing import part_of

# What DeepSpeed itself keeps at the top; all else is the client's state.
_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"),
    *("csr_tensor_module_names", "num_experts"),
}
_PASSED_ON = ("lr_scheduler", "data_sampler", "random_ltd")
_COUNTS = ("global_steps", "global_samples", "skipped_steps")
Fragments = tuple[Tensor, ...]


@dataclass
class ModelFile:
    """What there is beside the optimizer's state.

    Args:
        path: of the file.
        groups: shapes by name, for each group of parameters (stage 3: for each sub-group); None in
            stage 0, of whose optimizer nothing is known.
        version: of DeepSpeed; None: the file does not say.
        processes: that wrote the checkpoint; likewise.
        tensors: frozen parameters, buffers and, in stage 0, all weights: the parts of each, which
            lie one after another, and its shape.
        cast: trained parameters in the dtype of the model, where the file has them.
        extra: what a state dict has beside parameters and buffers.
        client: what the client saved, and what a run goes on with.
        ties: names of parameters that are others, with the names of those.
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


def model_of(files: list[Fields], is_by_process: bool) -> ModelFile:
    """Return what the model files of a checkpoint say.

    Args:
        files: one, or one of each process.
        is_by_process: the latter, as in stage 3, where empty tensors stand for parameters.

    Raises:
        ValueError: they are not of one run, or break a rule of their format.
    """
    first = files[0]
    for other in files[1:]:
        _check_same_run(first, other)
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
    _add_module(model, first, trained, is_by_process)
    own = {key: first.content.get(key) for key in (*_COUNTS, *_PASSED_ON)}
    model.client = {key: value for key, value in own.items() if value is not None}
    model.client |= {k: value for k, value in first.content.items() if k not in _OWN}
    return model


def _check_same_run(first: Fields, other: Fields) -> None:
    for key in ("param_shapes", "frozen_param_shapes", "ds_version", "dp_world_size", *_COUNTS):
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


def _add_module(model: ModelFile, first: Fields, trained: set[str], has_empty: bool) -> None:
    """Add buffers, what else no optimizer has, and extra state."""
    module = first.inside("module")
    buffers = {first.text(n) for n in first.get("buffer_names", list, default=[])}
    tied: list[str] = []
    for name, value in module.content.items():
        module.text(name)
        if name.rpartition(".")[2] == EXTRA_STATE or not isinstance(value, Tensor):
            model.extra[name] = value
            continue
        tensor = module.tensor(value, name)
        if has_empty and not tensor.numel() and name not in buffers:
            continue
        if name in trained:
            model.cast[name] = tensor
        elif name in model.ties:
            tied.append(name)
        elif name not in model.tensors:
            shape = shape_of(module.path, name, tensor.shape)
            model.tensors[name] = (shape, (tensor.view(-1),))
    for name in tied:
        kept = model.ties[name]
        if kept not in trained and kept not in model.tensors:
            raise ValueError(
                f"{OP}: {first.path} has {name!r} tied to {kept!r}, expected that to be in the"
                " checkpoint"
            )
