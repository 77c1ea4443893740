"""Source: what a folder of DeepSpeed's holds, each tensor put together when it is asked for."""

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.flat_groups import FlatGroups
from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy, cut, joined, lazy, lazy_number
from deepspeed_ext.zero.deepspeed_folders.model_file import (
    ModelFile,
    add_module,
    check_same_run,
    model_of,
)
from deepspeed_ext.zero.deepspeed_folders.optimizer_files import (
    OptimizerFiles,
    optimizer_of,
    processes_of,
)
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields, is_same, read_pickle
from deepspeed_ext.zero.deepspeed_folders.shard_files import ShardFiles, check_count, is_universal
from deepspeed_ext.zero.deepspeed_folders.universal import UniversalFolder
from deepspeed_ext.zero.deepspeed_folders.whole_state import Names, WholeState

_SCALER = "loss_scaler"


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
        ties: other names of tied parameters, with those that are in `weights`.
    """

    weights: dict[str, Lazy] = field(default_factory=dict)
    state: dict[str, dict[str, Lazy]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def source_of(files: ShardFiles, names: Names | None = None) -> Source:
    """Return what the files of a checkpoint hold.

    Args:
        files: of the checkpoint.
        names: of the parameters of each group, if they are known: stage 0 does not tell them.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: files are not of one run, or break a rule of their format, or numbers are left
            over or missing.
    """
    stages = [_Stage(files, number) for number in range(len(files.stages))]
    for other in stages[1:]:
        check_same_run(stages[0].file, other.file)
    wanted = stages[0].file.get("mp_world_size", int, default=len(stages))
    if wanted != len(stages):
        raise ValueError(
            f"{OP}: {stages[0].file.path} is of {wanted} model-parallel ranks, expected"
            f" {len(stages)} as there are files; it is of another run"
        )
    for number, path in sorted(files.layers.items()):
        layer = Fields(path, read_pickle(path), "")
        inside = {f"{number}.{name}" for name in layer.content}
        owner = next((one for one in stages if inside & one.trained.keys()), stages[0])
        add_module(owner.model, layer, f"{number}.", owner.trained, False)
    for path in files.experts:
        experts = Fields(path, read_pickle(path), "")
        add_module(stages[0].model, experts, "", stages[0].trained, False)
    source = stages[0].source(files, names)
    for stage in stages[1:]:
        _join(source, stage.source(files, names), stage.file.path)
    return source


class _Stage:
    """What a stage of a pipeline has, or all where there is none.

    Args:
        files: of the checkpoint.
        number: of the stage.

    Attributes:
        file: the first model file.
        model: what the model files say.
        trained: what the optimizer has, and where; nothing in stage 0.
    """

    def __init__(self, files: ShardFiles, number: int) -> None:
        self._files, self._folder, self._number = files.stages[number], files.folder, number
        read = [Fields(path, read_pickle(path), "") for path in self._files.model]
        self.file = read[0]
        self.model = model_of(read)
        self._universal: UniversalFolder | None = None
        self._optimizer: OptimizerFiles | None = None
        self.trained: dict[str, Lazy] = {}
        if self.model.groups is None:
            pass  # of stage 0
        elif not self._files.optimizer and is_universal(files.folder):
            self._universal = UniversalFolder(files.folder, self.model)
            self.trained = self._universal.weights
        elif not self._files.optimizer:
            raise FileNotFoundError(
                errno.ENOENT,
                f"{OP}: {files.folder} has no file *_optim_states.pt, expected one of each process",
            )
        else:
            self._optimizer = self._read_optimizer()
            self._flat = FlatGroups(self.model, self._optimizer)
            self.trained = {name: self._flat.tensor(name) for name in self._flat.places}
        module = self.file.content.get("module")
        if module is not None or not files.layers:
            module = self.file.inside("module")
            add_module(self.model, module, "", self.trained, self._files.is_by_process)

    def source(self, files: ShardFiles, names: Names | None) -> Source:
        """Return what this stage holds, when all of its module is there."""
        model = self.model
        source = Source(extra=model.extra, client=model.client, ties=model.ties)
        if model.groups is None:
            self._add_whole(source, files, names)
        if self._optimizer is not None and not self._files.is_by_process:
            _check_cast(files, model, self.trained)
        source.weights = {name: _checked(model, name, one) for name, one in self.trained.items()}
        if self._universal is not None:
            self._universal.check_names(model)
            source.state, source.groups = self._universal.state, self._universal.groups
            _add_scaler(source, model, self._universal.scaler)
        elif self._optimizer is not None:
            self._add_state(source, self._optimizer)
            _add_scaler(source, model, self._optimizer.scaler)
        source.weights |= {
            name: lazy(shape, parts[0].dtype, partial(cut, parts))
            for name, (shape, parts) in model.tensors.items()
        }
        return source

    def _add_state(self, source: Source, optimizer: OptimizerFiles) -> None:
        flat = self._flat
        source.groups = [{"params": [], **options} for options in optimizer.options]
        for name, place in flat.places.items():
            state = {key: flat.tensor(name, key) for key in flat.keys(name)}
            state |= {key: lazy_number(value) for key, value in flat.numbers(name).items()}
            if state:
                source.state[name] = state
            source.groups[optimizer.group_of[place.flat]]["params"].append(name)

    def _add_whole(self, source: Source, files: ShardFiles, names: Names | None) -> None:
        """Add the state of stage 0, if it can be told what it belongs to."""
        model = self.model
        if model.optimizer is None or files.layers:
            what = "a pipeline or experts" if files.layers or files.experts else "no optimizer"
            source.reason = f"{model.path} is of stage 0 with {what}, without state that is read"
            return
        try:
            whole = WholeState(model, names)
        except ValueError as error:
            source.reason = str(error).removeprefix(f"{OP}: ")
            return
        source.state, source.groups = whole.state, whole.groups
        _add_scaler(source, model, whole.scaler)
        for name in whole.weights:
            shape, parts = model.tensors.pop(name)
            model.cast[name] = joined(parts).view(shape)
        self.trained = whole.weights

    def _read_optimizer(self) -> OptimizerFiles:
        paths, model = self._files.optimizer, self.model
        first = Fields(paths[0], read_pickle(paths[0]), "")
        processes = processes_of(first)
        check_count(self._folder, self._number, self._files, processes)
        if model.processes not in (None, processes):
            raise ValueError(
                f"{OP}: {model.path} is of {model.processes} processes, expected {processes} as"
                f" {first.path.name} says; it is of another run"
            )
        others = [Fields(path, read_pickle(path), "") for path in paths[1:]]
        for file in (first, *others):
            version = file.get("ds_version", str, default=model.version)
            if version != model.version:
                raise ValueError(
                    f"{OP}: {file.path} is of DeepSpeed {version!r:.40}, expected"
                    f" {model.version!r:.40} as {model.path.name} is; it is of another run"
                )
        optimizer = optimizer_of([first, *others])
        if optimizer.is_in_each != self._files.is_by_process:
            raise ValueError(
                f"{OP}: {first.path} is of stage {3 if optimizer.is_in_each else '1 or 2'},"
                f" expected the stage of {self._files.model[0].name}; it is of another run"
            )
        return optimizer


def _check_cast(files: ShardFiles, model: ModelFile, trained: Iterable[str]) -> None:
    """Refuse a folder that lacks the file of a layer or of an expert that was trained."""
    for name in trained:
        is_apart = files.layers and name.split(".")[0].isdecimal()
        if name not in model.cast and (is_apart or not files.layers):
            raise ValueError(
                f"{OP}: {files.folder} has no model file with {name!r}, expected the weight there"
                f" too, as {model.path.name} has its shape"
            )


def _join(source: Source, stage: Source, path: Path) -> None:
    """Add what another stage of a pipeline holds; tied parameters are in several."""
    for name in source.weights.keys() & stage.weights.keys():
        mine, other = source.weights[name], stage.weights[name]
        text = f"{path} has another {name!r} than the stage before"
        source.weights[name] = Lazy(mine.described, partial(_like, mine, other, text))
    source.weights = {**stage.weights, **source.weights}
    source.state = {**stage.state, **source.state}
    source.extra |= stage.extra
    source.ties |= stage.ties
    source.reason = source.reason or stage.reason
    if source.groups is None or stage.groups is None:
        source.groups = None
        return
    pairs = list(zip(source.groups, stage.groups, strict=False))
    options = [[{**group, "params": []} for group in pair] for pair in pairs]
    if len(source.groups) != len(stage.groups) or not all(is_same(a, b) for a, b in options):
        raise ValueError(
            f"{OP}: {path} is of a stage with other groups or options than the one before, expected"
            " the same"
        )
    for group, more in pairs:
        group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))


def _add_scaler(source: Source, model: ModelFile, scaler: dict[str, float] | None) -> None:
    if scaler is None:
        return
    if _SCALER in source.client:
        raise ValueError(
            f"{OP}: {model.path} has {_SCALER!r} in the client's state, expected another name: that"
            " of the optimizer's files has it here"
        )
    source.client[_SCALER] = scaler


def _checked(model: ModelFile, name: str, weight: Lazy) -> Lazy:
    """Return a weight that is compared with the model file's when it is read."""
    if name not in model.cast:
        return weight
    cast = model.cast[name]
    other = lazy(cast.shape, cast.dtype, partial(cut, [cast.view(-1)]))
    text = f"{model.path} has another {name!r} than the optimizer's files"
    return Lazy(weight.described, partial(_like, weight, other, text))


def _like(weight: Lazy, other: Lazy, text: str, begin: int, end: int) -> Iterator[Tensor]:
    """Return parts of a weight that differ from those of another by rounding only."""
    shapes = [list(one.described.shape) for one in (other, weight)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{OP}: {text}: of shape {shapes[0]}, expected {shapes[1]}")
    for mine in weight.parts(begin, end):
        theirs = joined(other.parts(begin, begin + mine.numel()))
        begin += mine.numel()
        if not torch.equal(mine.to(theirs.dtype), theirs) and not _is_near(mine, theirs):
            raise ValueError(
                f"{OP}: {text}, expected the same but for rounding; they are of two moments, or of"
                " two runs"
            )
        yield mine


def _is_near(mine: Tensor, theirs: Tensor) -> bool:
    """Tell whether values are the same, whatever way they were rounded."""
    limits = torch.finfo(theirs.dtype if theirs.is_floating_point() else torch.float32)
    fits = torch.isclose(
        mine.clamp(limits.min, limits.max),  # what is beyond the range of float16 is inf there
        theirs.to(mine.dtype).clamp(limits.min, limits.max),
        rtol=limits.eps,
        atol=limits.smallest_normal,
        equal_nan=True,
    )
    return bool(fits.all())


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads, also where nothing is there yet."""
    return Path(os.path.realpath(path))
