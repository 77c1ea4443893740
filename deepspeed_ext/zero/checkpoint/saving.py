"""save and load: the state of a training, for any number of processes to go on from."""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult

from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.zero.agreement import all_or_none, check_agreement
from deepspeed_ext.zero.checkpoint.background import Saving, in_background
from deepspeed_ext.zero.checkpoint.exchange import (
    Exchange,
    made_for_saves,
    of_all,
    sendable,
    telling,
)
from deepspeed_ext.zero.checkpoint.folder import checked_tag, folder_of, name_latest
from deepspeed_ext.zero.checkpoint.plain_values import NotPlain, OutOfRange, dumps
from deepspeed_ext.zero.checkpoint.staging import staged
from deepspeed_ext.zero.checkpoint.storage import Encoded, InParts, Part, Reader, SavesParts, Writer
from deepspeed_ext.zero.checkpoint.training_state import (
    COMMON,
    Targets,
    check_extra,
    extra_of,
    options_of,
    state_of,
    take_extra,
    tensors_of,
    ties_of,
)
from deepspeed_ext.zero.sharding import Sharding, sharding_of

CLIENT = "client"
_SAVE, _LOAD = "zero.save", "zero.load"
_log = logging.getLogger("deepspeed_ext")


def save(
    folder: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    wait: bool = True,
    exclude_frozen: bool = False,
    names_latest: bool = True,
    **client_state: Any,
) -> Future[None]:
    """Save a training into folder/tag, and name it the latest one.

    All processes call it. The checkpoint is there when all of it is on the disks, or not at all;
    one of the same tag is there until then. It holds the model, the state of the optimizer in a
    form that any stage, mesh, tier and state format loads, each process's random numbers (torch's,
    Python's, NumPy's), and client_state, all as they are at the call. Of plain buffers, such as
    the statistics of BatchNorm, which may differ, and of get_extra_state it holds those of process
    0. Names are those of a model in which torch.compile and checkpoint_wrapper wrap nothing.

    Args:
        folder: that all processes see; made if it is not there.
        tag: a name for it.
        model: that zero.shard was called on, not between micro-steps.
        optimizer: of parameters of the model.
        wait: return when it is on the disk. False: copy all into host memory, which has to hold it,
            and return; a thread does the rest, with a group of processes of its own, over gloo,
            which destroy_process_group() leaves alone, and Python waits for the thread at its end.
            The next save and load wait for this one. If the last one fails and nobody asks the
            Future, the program ends with an error in the log and status 120.
        exclude_frozen: leave out parameters that need no gradient; `load` takes what is left with
            strict=False only.
        names_latest: False: the checkpoint before stays the latest one.
        client_state: of each process: None, numbers, text, bytes, tensors, dtypes, arrays of NumPy,
            and lists, tuples, sets and dicts of them, not nested deeper than 200 levels;
            or objects with a state_dict of such, as schedulers, LossScaler and data loaders have.
            Other classes come back as the plain type: an OrderedDict or a Counter as a dict, a
            named tuple or a torch.Size as a tuple, a frozenset as a set (not in a set or a key),
            a bytearray as bytes, a Parameter as a tensor. Tensors come back on the CPU, and
            contiguous; two that share memory come back apart.

    Returns:
        A Future of the save, of which result() raises what has failed.

    Raises:
        ValueError: the tag is no name, or not the same on all processes; something in client_state
            is nested too deep, contains itself, or is an int of more than 14,000 bits.
        TypeError: something in client_state is not plain.
        RuntimeError: the model is between micro-steps, or there is no process group any more.
        OSError: a disk is full, or cannot be written; BlockingIOError: another save writes there.
    """
    sharding = sharding_of(_SAVE, model)
    _check_group(_SAVE)
    with all_or_none(_SAVE, sharding.mesh):
        tag = checked_tag(_SAVE, tag)
        home = Path(os.path.abspath(path_text(_SAVE, folder)))  # the working folder may change
        sharding.check_idle(_SAVE)
        own = _encoded(
            name_of_process(dist.get_rank()), {CLIENT: _plain(client_state), **_random()}
        )
    lines = [f"tag {tag!r}", f"wait {wait}", f"exclude_frozen {exclude_frozen}"]
    lines += [f"client_state {name!r}" for name in client_state]
    check_agreement(_SAVE, lines, sharding.mesh)
    _await_previous(_SAVE, sharding)
    with all_or_none(_SAVE, sharding.mesh):
        parts: dict[str, Callable[[], Iterable[Tensor]]] | None = {} if wait else None
        content = _content(sharding, optimizer, not exclude_frozen, parts) | own
        if not wait:
            tensors = {n: t for n, t in content.items() if isinstance(t, Tensor)}
            copies, sharding.staging = staged(tensors, sharding.staging)
            content |= copies
    make_writer = partial(_Tagged, home, tag) if names_latest else partial(Writer, home / tag)
    if wait:
        _Save(content, make_writer(), of_all(sharding.mesh.device_type), parts or {}).write()
        done: Future[None] = Future()
        done.set_result(None)
        return done
    if sharding.saves_by is None:
        sharding.saves_by = made_for_saves(sharding.mesh.device_type)
    saving = in_background(_Save(content, make_writer(), sharding.saves_by).write)
    sharding.saving = saving
    return saving


def load_by(
    open_reader: Callable[[], tuple[Path, Reader]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Any],
    strict: bool,
    has_masters: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Load what a reader reads, as `zero.load` says.

    Args:
        open_reader: returns it, and the folder of the checkpoint.
        model, optimizer, objects, strict, has_masters: of `zero.load`.
    """
    sharding = sharding_of(_LOAD, model)
    _check_group(_LOAD)
    _await_previous(_LOAD, sharding)
    mesh = sharding.mesh
    with all_or_none(_LOAD, mesh):
        sharding.check_idle(_LOAD)
        path, reader = open_reader()
    lines = [f"checkpoint {path.name!r}", f"a {type(reader).__name__} for it"]
    check_agreement(_LOAD, lines, mesh)
    with all_or_none(_LOAD, mesh):
        metadata = reader.read_metadata()
        common = _fields(reader.value(metadata, COMMON), "processes", "groups")
        is_same = common["processes"] == dist.get_world_size()
        name = name_of_process(dist.get_rank() if is_same else 0)
        own = _fields(reader.value(metadata, name), CLIENT, "random")
        targets = Targets(
            *(_LOAD, sharding.model, optimizer, common["groups"], metadata),
            strict=strict,
            has_masters=has_masters,
        )
        _check_objects(objects, own[CLIENT])
        check_extra(_LOAD, sharding.model, common.get("extra"), strict=strict)
    _read(reader, targets.tensors, targets.parts())
    if targets.again:  # in all processes, or in none
        _read(reader, targets.again, targets.parts_again())
    with torch.no_grad():
        targets.take()
        take_extra(sharding.model, common.get("extra", {}))
    if is_same:
        _set_random(own["random"])
    for name, value in objects.items():
        value.load_state_dict(own[CLIENT].pop(name))
    client: dict[str, Any] = own[CLIENT]
    return client


def inspect(folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Return what client_state the first process saved, without loading anything else.

    Any process may call it, also where there are no others.

    Args:
        folder: that `save` was given.
        tag: of the checkpoint; None: the latest.

    Raises:
        OSError: there is no such checkpoint, or EBADMSG: its bytes are not what was saved.
        ValueError: it is not one of `save`.
    """
    reader = Reader(folder_of("zero.inspect", folder, tag))
    own = _fields(reader.value(reader.read_metadata(), name_of_process(0)), CLIENT)
    client: dict[str, Any] = own[CLIENT]
    return client


class _Tagged(Writer):
    """A writer whose checkpoint is the latest one as soon as it is there."""

    def __init__(self, home: Path, tag: str) -> None:
        super().__init__(home / tag)
        self._home, self._tag = home, tag

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        name_latest(self._home, self._tag)


def _await_previous(op: str, sharding: Sharding) -> None:
    """Wait for a save that is under way, and log its failure, unless its Future was asked.

    Raises:
        RuntimeError: this process was forked while it was under way, and does not have its thread.
    """
    saving: Saving | None = sharding.saving
    if saving is None:
        return
    if not saving.is_here():
        raise RuntimeError(
            f"{op}: this process is a fork of the one whose save is under way, expected the same;"
            " wait for the save before the fork, or leave checkpoints to that process"
        )
    sharding.saving, is_told = None, saving.is_told()
    error = saving.exception()
    if error is not None and not is_told:
        _log.error("zero.save: the save before this one failed: %s", error)


def _content(
    sharding: Sharding,
    optimizer: torch.optim.Optimizer | None,
    with_frozen: bool,
    parts: dict[str, Callable[[], Iterable[Tensor]]] | None,
) -> dict[str, Any]:
    """Return all that is saved, flat, but what `save` was given beside; see `state_of`."""
    model, is_first = sharding.model, dist.get_rank() == 0
    groups: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    if optimizer is not None:
        # First: it waits for the last step.
        state, groups = state_of(_SAVE, model, optimizer, parts)
        content |= state
    # Of buffers that differ, such as statistics, DCP would take some from each process.
    content |= tensors_of(_SAVE, model, with_buffers=is_first, with_frozen=with_frozen)
    if is_first:
        common = common_fields(dist.get_world_size(), groups, extra_of(model), ties_of(model))
        content |= _encoded(COMMON, common)
    return content


def common_fields(
    processes: int, groups: list[dict[str, Any]], extra: dict[str, Any], ties: dict[str, str]
) -> dict[str, Any]:
    """Return what a checkpoint says once.

    Args:
        processes: that saved it; 0: another program did, and there are no random numbers.
        groups: of the optimizer, as `state_of` returns them.
        extra: as `extra_of` returns it.
        ties: as `ties_of` returns them.
    """
    return {"processes": processes, "groups": options_of(groups), "extra": extra, "ties": ties}


def _encoded(name: str, value: object) -> dict[str, Any]:
    """Return a plain value as it is now, and the large tensors in it, which may still change."""
    apart: dict[str, Tensor] = {}
    try:
        return {name: Encoded(dumps(value, apart, name).encode()), **apart}
    except (NotPlain, OutOfRange) as error:
        raise type(error)(f"{_SAVE}: {error}") from None


class _Planner(SavesParts):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what is encoded already as it is."""
        return (
            object if isinstance(object, Encoded) else super().transform_object(write_item, object)
        )


class _Save:
    """What a process does for a save: all that needs torch's groups now, the rest in `write`.

    Args:
        content: of this process.
        writer: of the checkpoint.
        exchange: with the other processes.
        parts: of the content that is on meta.
    """

    def __init__(
        self,
        content: dict[str, Any],
        writer: Writer,
        exchange: Exchange,
        parts: Mapping[str, Callable[[], Iterable[Tensor]]] = MappingProxyType({}),
    ) -> None:
        self._exchange = exchange
        self._writer = writer
        self._planner = _Planner(parts)
        self._planner.set_up_planner(content, self._writer.storage_meta(), exchange.rank == 0)
        self._plan = self._planner.create_local_plan()
        self._metadata: Metadata | None = None

    def write(self) -> None:
        """Write the checkpoint, with all processes."""
        try:
            plan = self._exchange.step(
                lambda: self._writer.prepare_local_plan(self._plan), self._decide
            )
            self._exchange.step(lambda: self._written(plan), self._finish)
        finally:
            self._writer.abandon()  # nothing, if it has come so far that all may be there

    def _decide(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def _written(self, plan: SavePlan) -> list[WriteResult]:
        done = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        results: list[WriteResult] = done.wait()
        return results

    def _finish(self, results: list[list[WriteResult]]) -> list[None]:
        assert self._metadata is not None
        _check_processes(self._metadata, self._exchange.processes)
        self._writer.finish(self._metadata, results)
        return [None] * len(results)


def _check_processes(metadata: Metadata, processes: int) -> None:
    for name in (COMMON, *map(name_of_process, range(processes))):
        if name not in metadata.state_dict_metadata:
            raise RuntimeError(f"{_SAVE}: no process has given {name!r}, expected one of each")


def _read(reader: Reader, tensors: dict[str, Any], parts: Sequence[Part]) -> None:
    try:
        dcp_load(tensors, storage_reader=reader, planner=InParts(parts))
    except CheckpointException as error:
        raise _of_failures(error) from error


def _of_failures(error: CheckpointException) -> BaseException:
    """Return what this process raises, where torch has what is no Exception for failures of all."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    own = failures.get(dist.get_rank())
    if own is not None and not isinstance(own, Exception):
        return own
    return telling([sendable(failure) for failure in failures.values()])


def _plain(client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values, those of objects with a state_dict too."""
    values = {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in client_state.items()
    }
    for name, value in values.items():
        try:
            dumps(value, {}, within=2)  # what client_state is in, and it itself
        except (NotPlain, OutOfRange) as error:
            raise type(error)(f"{_SAVE}: client_state[{name!r}]: {error}") from None
    return values


def _check_objects(objects: Mapping[str, Any], client: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"{_LOAD}: {name} is a {type(value).__name__}, expected an object with"
                " load_state_dict; other values are returned"
            )
        if name not in client:
            raise ValueError(
                f"{_LOAD}: the checkpoint has {sorted(client)} as client_state, expected {name!r}"
                " among them"
            )


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ValueError(f"{_LOAD}: the checkpoint has no {names}, expected one of zero.save")
    return value


def name_of_process(rank: int) -> str:
    """Return what a process's own values are called in a checkpoint."""
    return f"process.{rank}"


def _random() -> dict[str, Any]:
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    own = {"cpu": torch.get_rng_state(), "cuda": on_device, "python": random.getstate()}
    return {"random": own | {"numpy": of_numpy}}


def _set_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.get("numpy") is not None:  # none in older checkpoints
        numpy.random.set_state(state["numpy"])


def _check_group(op: str) -> None:
    """Refuse to go on alone: torch would take this process for the only one."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{op}: torch.distributed has no process group, expected the one that zero.shard was"
            " called with; call destroy_process_group() after the last save or load"
        )
