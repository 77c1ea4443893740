"""Source: what a folder of DeepSpeed's holds, each tensor put together when it is asked for."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.flat_groups import FlatGroups
from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy, lazy, lazy_number
from deepspeed_ext.zero.deepspeed_folders.model_file import ModelFile, model_of
from deepspeed_ext.zero.deepspeed_folders.optimizer_files import optimizer_of, processes_of
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields, read_pickle
from deepspeed_ext.zero.deepspeed_folders.shard_files import ShardFiles, check_count
from deepspeed_ext.zero.deepspeed_folders.universal import UniversalFolder, is_universal

_ROOM = 1 << 22  # elements that are compared at once


@dataclass
class Source:
    """What a folder holds.

    Args:
        weights: trained and frozen parameters, tied ones once, and buffers, by name.
        state: of the optimizer, by names of parameters and keys.
        groups: of parameters: names as "params", and options; None: there are none, see `reason`.
        reason: why there is no optimizer's state.
        extra: what a state dict has beside parameters and buffers.
        client: what the client saved, and what a run goes on with.
    """

    weights: dict[str, Lazy] = field(default_factory=dict)
    state: dict[str, dict[str, Lazy]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)


def source_of(files: ShardFiles) -> Source:
    """Return what the files of a checkpoint hold.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: files are not of one run, or break a rule of their format, or numbers are left
            over or missing.
    """
    model = model_of([Fields(p, read_pickle(p), "") for p in files.model], files.is_by_process)
    source = Source(extra=model.extra, client=model.client)
    if model.groups is None:
        source.reason = f"{model.path} is of stage 0, whose files do not name what state belongs to"
    elif not files.optimizer and is_universal(files.folder):
        universal = UniversalFolder(files.folder, model)
        source.weights = {n: _checked(model, n, one) for n, one in universal.weights.items()}
        source.state = universal.state
        source.groups = universal.groups
        _add_scaler(source, universal.scaler)
    elif not files.optimizer:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{OP}: {files.folder} has no file *_optim_states.pt, expected one of each process",
        )
    else:
        _add_optimizer(source, model, files)
    source.weights |= {
        name: lazy(shape, parts[0].dtype, partial(_joined, shape, parts))
        for name, (shape, parts) in model.tensors.items()
    }
    return source


def _add_optimizer(source: Source, model: ModelFile, files: ShardFiles) -> None:
    assert model.groups is not None
    first = Fields(files.optimizer[0], read_pickle(files.optimizer[0]), "")
    processes = processes_of(first)
    check_count(files, processes)
    if model.processes not in (None, processes):
        raise ValueError(
            f"{OP}: {model.path} is of {model.processes} processes, expected {processes} as"
            f" {first.path.name} says; it is of another run"
        )
    others = [Fields(path, read_pickle(path), "") for path in files.optimizer[1:]]
    for file in (first, *others):
        version = file.get("ds_version", str, default=model.version)
        if version != model.version:
            raise ValueError(
                f"{OP}: {file.path} is of DeepSpeed {version!r:.40}, expected {model.version!r:.40}"
                f" as {model.path.name} is; it is of another run"
            )
    optimizer = optimizer_of([first, *others])
    if optimizer.is_in_each != files.is_by_process:
        raise ValueError(
            f"{OP}: {first.path} is of stage {3 if optimizer.is_in_each else '1 or 2'}, expected"
            f" the stage of {files.model[0].name}; it is of another run"
        )
    flat = FlatGroups(model, optimizer)
    for name, place in flat.places.items():
        weight = lazy(place.shape, flat.dtype(name), partial(flat.weight, name))
        source.weights[name] = _checked(model, name, weight)
        state = {
            key: lazy(place.shape, flat.dtype(name, key), partial(flat.state, name, key))
            for key in flat.keys(name)
        }
        state |= {key: lazy_number(value) for key, value in flat.numbers(name).items()}
        if state:
            source.state[name] = state
    if optimizer.options is None:
        source.reason = f"{first.path} is of elastic_checkpoint, which keeps no options of groups"
        return
    source.groups = [{"params": [], **options} for options in optimizer.options]
    for name, place in flat.places.items():
        source.groups[optimizer.group_of[place.flat]]["params"].append(name)
    _add_scaler(source, optimizer.scaler)


def _add_scaler(source: Source, scaler: dict[str, float] | None) -> None:
    if scaler is not None:
        source.client["loss_scaler"] = scaler


def _joined(shape: torch.Size, parts: tuple[Tensor, ...]) -> Tensor:
    """Return a whole tensor of its parts, the last of which may have padding."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined[: shape.numel()].view(shape)


def _checked(model: ModelFile, name: str, weight: Lazy) -> Lazy:
    """Return a weight that is compared with the model file's when it is read."""
    if name not in model.cast:
        return weight
    return Lazy(weight.described, partial(_like_cast, weight.read, model, name))


def _like_cast(read: Callable[[], Tensor], model: ModelFile, name: str) -> Tensor:
    """Return a weight that differs from what the model file has of it by rounding only."""
    weight, cast = read(), model.cast[name]
    if cast.shape != weight.shape:
        raise ValueError(
            f"{OP}: {model.path} has shape {list(cast.shape)} for {name!r} in module, expected"
            f" {list(weight.shape)} as in param_shapes"
        )
    if torch.equal(weight.to(cast.dtype), cast):  # nearly always
        return weight
    limits = torch.finfo(cast.dtype if cast.is_floating_point() else torch.float32)
    pairs = zip(weight.view(-1).split(_ROOM), cast.view(-1).split(_ROOM), strict=True)
    for mine, theirs in pairs:
        # Whatever way it was rounded; what is beyond the range of float16 is inf there.
        fits = torch.isclose(
            mine.clamp(limits.min, limits.max),
            theirs.to(mine.dtype).clamp(limits.min, limits.max),
            rtol=limits.eps,
            atol=limits.smallest_normal,
            equal_nan=True,
        )
        if not fits.all():
            raise ValueError(
                f"{OP}: {model.path} has another {name!r} than the optimizer's files, expected the"
                " same but for rounding; they are of two moments, or of two runs"
            )
    return weight


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads, also where nothing is there yet."""
    return Path(os.path.realpath(path))
