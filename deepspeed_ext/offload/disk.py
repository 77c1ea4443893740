"""What an optimizer has of a disk: a store, the ring of memory before it, and its commits."""

import errno
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.io import TensorStore
from deepspeed_ext.offload.param_table import ParamTable
from deepspeed_ext.offload.pipeline import Pipeline
from deepspeed_ext.offload.tiers.commits import Commits, Processes
from deepspeed_ext.offload.tiers.contents import (
    check_fits,
    committed_state,
    describe,
    names_in,
    restore_weights,
)
from deepspeed_ext.offload.tiers.disk_state import DiskState
from deepspeed_ext.offload.tiers.prompt_switches import prompt_switches
from deepspeed_ext.offload.tiers.records import Records
from deepspeed_ext.offload.tiers.ring import Ring
from deepspeed_ext.offload.tiers.room import RingRoom
from deepspeed_ext.optim.buckets import Bucket

Groups = Sequence[Mapping[str, Any]]
Buckets = list[tuple[Bucket, list[int]]]  # with the numbers of their parameters


_MANIFEST = 1 << 20  # bytes that a disk has beside what is reserved


class Disk:
    """A store in a folder for the state of one optimizer.

    Args:
        title: of the optimizer, for errors.
        path: the folder. A durable store has one of its own there for each process.
        nbytes: of all that is to be on it.
        room: of the ring.
        durable: it stays, and can be committed.
        resume: go on from the last commit.

    Attributes:
        ring: by which state comes and goes.
        commits: what was committed; None: the store is not durable.

    Raises:
        OSError: there is no such folder, or not so much room; and see Commits.
    """

    def __init__(
        self,
        title: str,
        path: str | os.PathLike[str],
        nbytes: int,
        room: RingRoom,
        durable: bool,
        resume: bool,
    ) -> None:
        self._title, self._room = title, room
        folder = Path(path)
        if durable:
            folder /= f"process-{Processes.now().rank}"
        try:
            if durable:
                folder.parent.mkdir(exist_ok=True)
            store = TensorStore(folder, durable)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            why = f"{title}: nvme_path is {path}, expected a folder to write in: {error.strerror}"
            raise OSError(error.errno, why) from error
        try:
            self.records = Records(store)
            self.commits = Commits(title, self.records, resume) if durable else None
            _reserve(title, store, nbytes - store.stats()["used_bytes"])
            if durable and 0 <= store.stats()["disk_free_bytes"] < _MANIFEST:
                why = f"{title}: nvme_path is {path} without room for a manifest beside all else"
                raise OSError(errno.ENOSPC, why)
        except BaseException:
            store.close()
            raise
        self.ring = Ring(self.records, room.slab_bytes, room.slabs)

    def maker(self, table: ParamTable[Any]) -> Callable[..., Bucket]:
        """Return what makes a bucket, by where the state of its parameters is to be.

        A class has it, which is garbage long after the table could go.
        """
        tables, disks = weakref.ref(table), weakref.ref(self.records)
        known = weakref.WeakSet[DiskState]()
        return partial(_made, self._title, tables, disks, self._room.slab_bytes, known)

    def commit(
        self, pipeline: Pipeline, groups: Groups, model: nn.Module | None, extra: dict[str, Any]
    ) -> None:
        """See OffloadOptimizer.commit."""
        self.ring.check_process()
        if self.commits is None or self.records.store.closed:
            got = "of a scratch store" if self.commits is None else "after close()"
            raise RuntimeError(
                f"{self._title}: commit is called {got}, expected an open one with durable=True"
            )
        with self.ring.turn():
            buckets = _settled_buckets(pipeline)
            others = _others(pipeline, buckets)
            made = partial(describe, groups=groups, model=model, buckets=buckets, others=others)
            self.commits.write(self.ring, made, extra)

    def restore(
        self,
        pipeline: Pipeline,
        groups: Groups,
        model: nn.Module | None,
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Give weights, state and options what was committed, if there is a commit to go on from.

        Args:
            pipeline: of the optimizer.
            groups: of the optimizer.
            model: or None.
            load: takes a state dict.

        Raises:
            ValueError: it is of other parameters.
        """
        contents = None if self.commits is None else self.commits.contents
        if contents is None:
            return
        check_fits(self._title, contents, groups, model)
        self.records.verify(names_in(contents))
        with torch.no_grad():
            restore_weights(self.records, contents, groups, model)
        load(committed_state(self.records, contents, pipeline.host_optimizer.params()))


def commit(
    title: str,
    disk: Disk | None,
    pipeline: Pipeline,
    groups: Groups,
    model: nn.Module | None,
    extra: dict[str, Any],
) -> None:
    """Commit what is on a disk, if there is one."""
    if disk is None:
        raise RuntimeError(
            f"{title}: commit is called with device='cpu', expected 'nvme' with durable=True"
        )
    with torch.no_grad():
        disk.commit(pipeline, groups, model, extra)


@contextmanager
def turn(disk: Disk | None) -> Iterator[None]:
    """Let one thread at a time step or commit; one that steps gets the interpreter soon."""
    if disk is None:
        yield
        return
    with disk.ring.turn(), prompt_switches():
        yield


def restore_options(disk: Disk | None, groups: list[dict[str, Any]]) -> None:
    """Give groups the options that the last commit has, if there is one."""
    if disk is not None and disk.commits is not None:
        for group, saved in zip(groups, disk.commits.options, strict=False):  # others came since
            group.update(saved)


def _settled_buckets(pipeline: Pipeline) -> Buckets:
    """Return all buckets, each with the numbers of its parameters, when all state is at rest."""
    pipeline.finish()
    pipeline.finish_disk()
    pipeline.follow()
    pipeline.place()
    numbers = {id(copy): i for i, copy in enumerate(pipeline.host_optimizer.params())}
    buckets = [bucket for _, bucket in pipeline.host_optimizer.buckets()]
    for bucket in buckets:
        if isinstance(bucket, DiskState):
            exposed = set(bucket.exposed)
            bucket.flush(sorted(exposed))
            bucket.exposed |= exposed  # who was shown it may still write to it
    return [(bucket, [numbers[id(copy)] for copy in bucket.params]) for bucket in buckets]


def _others(pipeline: Pipeline, buckets: Buckets) -> dict[int, dict[str, Any]]:
    """Return what users keep in the state of parameters, by number: what is in no bucket."""
    own = {number: bucket.views(0).keys() for bucket, numbers in buckets for number in numbers}
    found = {}
    for number, copy in enumerate(pipeline.host_optimizer.params()):
        entry = pipeline.host_optimizer.state.get(copy, {})
        others = {k: v for k, v in entry.items() if k not in own.get(number, ())}
        if others:
            found[number] = others
    return found


def folder_of(
    name: str,
    device: str,
    path: str | os.PathLike[str] | None,
    fraction: float | None,
    durable: bool,
    resume: bool,
) -> str | None:
    """Return the folder where state rests, if it rests on disk, wherever a copy is made.

    Raises:
        ValueError: the options do not fit together.
        TypeError: likewise.
    """
    if device not in ("cpu", "nvme"):
        raise ValueError(f"{name}: device is {device!r}, expected 'cpu' or 'nvme'")
    if device == "nvme" and path is None:
        raise ValueError(f"{name}: nvme_path is None, expected a folder with device='nvme'")
    of_disks = {"nvme_path": path, "nvme_fraction": fraction, "durable": durable or None}
    for given, flag in {"durable": durable, "resume": resume}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: {given} is {flag!r}, expected True or False")
    for given, value in of_disks.items():
        if device == "cpu" and value is not None:
            raise ValueError(f"{name}: {given} is given, expected device='nvme' with it")
    if fraction is not None and not (isinstance(fraction, Real) and 0 <= fraction <= 1):
        raise ValueError(f"{name}: nvme_fraction is {fraction!r}, expected 0 to 1")
    if path is not None and (
        not isinstance(path, str | bytes | os.PathLike) or not os.fspath(path)
    ):
        raise ValueError(f"{name}: nvme_path is {path!r}, expected a folder")
    if resume and not durable:
        raise ValueError(f"{name}: resume is True, expected durable=True with it")
    return None if path is None else os.path.abspath(os.fsdecode(path))


def _reserve(title: str, store: TensorStore, nbytes: int) -> None:
    """Have room in a store for so many bytes that are yet to be written.

    Raises:
        OSError: there is not so much.
    """
    try:
        store.reserve(max(0, nbytes), in_parts=True)
    except OSError as error:
        why = f"{title}: nvme_path is {store.path} with too little room: {error.strerror}"
        raise OSError(error.errno, why) from error


def _made(
    title: str,
    tables: "weakref.ref[ParamTable[Any]]",
    disks: "weakref.ref[Records]",
    slab_bytes: int,
    states: "weakref.WeakSet[DiskState]",
    params: list[Tensor],
    *others: Any,
) -> Bucket:
    table, records = tables(), disks()
    assert table is not None and records is not None  # an optimizer has both
    if not table.of_copy(params[0]).is_on_disk:
        return Bucket(params, *others)
    made = DiskState(table.param_of, records, slab_bytes, params, *others)
    # Now, while nothing has changed: in the middle of a step it would be too late.
    times = 2 if records.store.durable else 1
    _reserve(title, records.store, times * sum(s.unwritten_bytes for s in (made, *states)))
    states.add(made)
    return made
