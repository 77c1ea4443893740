"""save and load: the state of a training, for any number of processes to go on from."""

import logging
import os
import random
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.zero.agreement import all_or_none, check_agreement
from deepspeed_ext.zero.checkpoint.folder import checked_tag, folder_of, name_latest
from deepspeed_ext.zero.checkpoint.plain_values import NotPlain, dumps
from deepspeed_ext.zero.checkpoint.staging import staged
from deepspeed_ext.zero.checkpoint.storage import Reader, Writer
from deepspeed_ext.zero.checkpoint.training_state import Targets, options_of, state_of, tensors_of
from deepspeed_ext.zero.sharding import Sharding, sharding_of

COMMON = "common"
_SAVE, _LOAD = "zero.save", "zero.load"
_log = logging.getLogger("deepspeed_ext")


def save(
    folder: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    wait: bool = True,
    **client_state: Any,
) -> Future[None]:
    """Save a training into folder/tag, and name it the latest one.

    All processes call it. The checkpoint is there when all of it is on the disks, or not at all;
    one of the same tag is there until then. It holds the model, the state of the optimizer in a
    form that any stage, mesh, tier and state format loads, each process's random numbers, and
    client_state.

    Args:
        folder: that all processes see; made if it is not there.
        tag: a name for it.
        model: that zero.shard was called on, not between micro-steps.
        optimizer: of parameters of the model.
        wait: return when it is on the disk. False: copy all into host memory, which has to hold it,
            and return; a thread does the rest, with a group of processes of its own, over gloo. The
            next save waits for this one, and uses its memory again.
        client_state: of each process: numbers, text, tensors, lists and dicts of them; or objects
            with a state_dict of such, as schedulers, LossScaler and data loaders have.

    Returns:
        A Future of the save, of which result() raises what has failed.

    Raises:
        ValueError: the tag is no name, or not the same on all processes.
        TypeError: something in client_state is not plain.
        RuntimeError: the model is between micro-steps.
        OSError: a disk is full, or cannot be written.
    """
    sharding = sharding_of(_SAVE, model)
    with all_or_none(_SAVE, sharding.mesh):
        tag = checked_tag(_SAVE, tag)
        home = Path(path_text(_SAVE, folder))
        sharding.check_idle(_SAVE)
        client = _plain(client_state)
    lines = [f"tag {tag!r}", f"wait {wait}", *(f"client_state {name!r}" for name in client_state)]
    check_agreement(_SAVE, lines, sharding.mesh)
    _await_previous(sharding)
    with all_or_none(_SAVE, sharding.mesh):
        content = _content(sharding, optimizer, client)
        if not wait:
            tensors = {n: t for n, t in content.items() if isinstance(t, Tensor)}
            copies, sharding.staging = staged(tensors, sharding.staging)
            content |= copies
    done: Future[None] = Future()
    if wait:
        _write(content, home, tag, None)
        done.set_result(None)
        return done
    if sharding.saves_by is None:
        sharding.saves_by = dist.new_group(backend="gloo", timeout=_timeout(sharding))
    threads = ThreadPoolExecutor(1, thread_name_prefix="zero.save")
    done = threads.submit(_write, content, home, tag, sharding.saves_by)
    threads.shutdown(wait=False)
    sharding.saving = done
    return done


def _timeout(sharding: Sharding) -> timedelta | None:
    """Return that of the default group: others would wait half an hour for who has ended."""
    world: Any = dist.group.WORLD
    backend = world._get_backend(torch.device(sharding.mesh.device_type))
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def load(
    folder: str | os.PathLike[str],
    tag: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Go on from what `save` left, on any number of processes.

    All processes call it. Each reads its own rows, and checks what it reads; nothing in the files
    is run. It is read to where weights and state are, which are of no use after an error in that.
    With as many processes as saved, random numbers go on as they would have, and so does
    all training, bit for bit; otherwise they are left alone, and client_state is that of the first
    process.

    Args:
        folder: that `save` was given.
        tag: of the checkpoint; None: the latest.
        model: that zero.shard was called on, of the same architecture. Float32 weights are read
            from the masters of those that were saved in fewer bits.
        optimizer: of any class that takes the state, in any state format; None leaves it out.
        objects: whose load_state_dict gets what client_state of the same name was.

    Returns:
        The rest of client_state, by name.

    Raises:
        OSError: there is no such checkpoint, or EBADMSG: its bytes are not what was saved.
        ValueError: it is of another model, or of other groups of parameters, named in the text;
            nothing has changed then.
        RuntimeError: the model is between micro-steps, or another process failed.
    """
    sharding = sharding_of(_LOAD, model)
    mesh = sharding.mesh
    with all_or_none(_LOAD, mesh):
        sharding.check_idle(_LOAD)
        path = folder_of(_LOAD, folder, tag)
    check_agreement(_LOAD, [f"checkpoint {path.name!r}"], mesh)
    with all_or_none(_LOAD, mesh):
        reader = Reader(path)
        metadata = reader.read_metadata()
        common = _fields(reader.value(metadata, COMMON), "processes", "groups")
        is_same = common["processes"] == dist.get_world_size()
        name = _name_of(dist.get_rank() if is_same else 0)
        own = _fields(reader.value(metadata, name), "client", "random")
        targets = Targets(_LOAD, sharding.model, optimizer, common["groups"], metadata)
        _check_objects(objects, own["client"])
    _read(reader, targets.tensors)
    if targets.again:  # in all processes, or in none
        _read(reader, targets.again)
    with torch.no_grad():
        targets.take()
    if is_same:
        _set_random(own["random"])
    for name, value in objects.items():
        value.load_state_dict(own["client"].pop(name))
    client: dict[str, Any] = own["client"]
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
    own = _fields(reader.value(reader.read_metadata(), _name_of(0)), "client")
    client: dict[str, Any] = own["client"]
    return client


class _Tagged(Writer):
    """A writer whose checkpoint is the latest one as soon as it is there."""

    def __init__(self, home: Path, tag: str) -> None:
        super().__init__(home / tag)
        self._home, self._tag = home, tag

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        name_latest(self._home, self._tag)


def _await_previous(sharding: Sharding) -> None:
    """Wait for a save that is under way; whoever has its Future is told of its failure."""
    saving, sharding.saving = sharding.saving, None
    error = None if saving is None else saving.exception()
    if error is not None:
        _log.error("zero.save: the save before this one failed: %s", error)


def _content(
    sharding: Sharding, optimizer: torch.optim.Optimizer | None, client: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that is saved, flat."""
    model = sharding.model
    groups: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    if optimizer is not None:
        state, groups = state_of(_SAVE, model, optimizer)  # first: it waits for the last step
        content |= state
    content |= tensors_of(model)
    try:
        common = {"processes": dist.get_world_size(), "groups": options_of(groups)}
        own = {"client": client, "random": _random()}
        dumps([common, own])
        return content | {COMMON: common, _name_of(dist.get_rank()): own}
    except NotPlain as error:
        raise TypeError(f"{_SAVE}: {error}") from None


def _write(content: dict[str, Any], home: Path, tag: str, group: dist.ProcessGroup | None) -> None:
    writer = _Tagged(home, tag)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_save(content, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        writer.abandon()
        raise _first(error) from error


def _read(reader: Reader, tensors: dict[str, Any]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_load(tensors, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        raise _first(error) from error


def _first(error: CheckpointException) -> BaseException:
    """Return what has failed first, if it says enough."""
    failures = [failure for failure, _ in error.failures.values()]
    return next((f for f in failures if isinstance(f, OSError | ValueError | TypeError)), error)


def _plain(client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values, those of objects with a state_dict too."""
    values = {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in client_state.items()
    }
    for name, value in values.items():
        try:
            dumps(value)
        except NotPlain as error:
            raise TypeError(f"{_SAVE}: client_state[{name!r}]: {error}") from None
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


def _name_of(rank: int) -> str:
    return f"process.{rank}"


def _random() -> dict[str, Any]:
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"cpu": torch.get_rng_state(), "cuda": on_device, "python": random.getstate()}


def _set_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
