"""Writer and Reader: torch's distributed checkpoint (DCP) over this package's I/O engine."""

import contextlib
import errno
import fcntl
import io
import itertools
import os
import pickle
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.serialization import get_unsafe_globals_in_checkpoint

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.regular_file import open_regular, path_text, sync_folder
from deepspeed_ext.io.tensors import bytes_of, empty
from deepspeed_ext.zero.checkpoint import data_file, manifest
from deepspeed_ext.zero.checkpoint.manifest import Piece
from deepspeed_ext.zero.checkpoint.plain_values import NotPlain, OutOfRange, dumps, loads
from deepspeed_ext.zero.checkpoint.reading import Wanted, read

MANIFEST = "manifest.json"
_DATA = re.compile(r"([0-9a-f]{16})-(\d+)\.safetensors")  # save, process
_ASIDE = ".saving-"  # begins the names of what is there during a save only
_MAX_MANIFEST_BYTES = 1 << 30


class Encoded(io.BytesIO):
    """A plain value as it is to be in the file."""


class Writer(StorageWriter):
    """Save by DCP into a folder: safetensors files with checksums, and a manifest that comes last.

        torch.distributed.checkpoint.save(state_dict, storage_writer=zero.Writer("checkpoint"))

    Killed at any moment, it leaves the whole new checkpoint or the old one, if the folder had one;
    what it left beside is removed by the next one. Each process writes what DCP plans for it, and
    needs no more host memory than its largest tensor on a device and 256 MiB.

    Args:
        path: the folder, which all processes see; made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path_text("zero.Writer", path))
        self._save_id = ""
        self._held = contextlib.ExitStack()  # what keeps others from saving there
        self._may_be_there = False  # the manifest that tells of the new files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a checkpoint, in another folder if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; all that is needed comes with the plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        _make_folder(self._path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all processes names of files that are nobody else's, and a mark to be seen by all.

        Raises:
            BlockingIOError: another program saves there.
        """
        self._held.close()
        self._held.enter_context(_held(self._path))
        self._may_be_there = False
        self._save_id = secrets.token_hex(8)
        _mark(self._path, self._save_id).touch(exist_ok=False)
        return [
            replace(plan, storage_data=f"{self._save_id}-{i}.safetensors")
            for i, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this process has to, to the disk.

        Raises:
            OSError: it cannot; or the folder is not that of the process which decides.
        """
        _check_is_shared(self._path, str(plan.storage_data))
        items = {_name_in_file(item.index): item for item in plan.items}
        tensors = {name: _content(item, planner) for name, item in items.items()}
        pieces: dict[str, Piece] = {}
        if tensors:
            path = os.fspath(self._path / str(plan.storage_data))
            made = planner.parts if isinstance(planner, SavesParts) else {}

            def read(name: str) -> Iterable[Tensor]:
                parts = made.get(items[name].index.fqn)
                return [tensors[name]] if parts is None else parts()

            with AsyncIO() as engine:
                pieces = data_file.write(path, tensors, engine, read if made else None)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, pieces[n].nbytes, pieces[n]) for n, item in items.items()]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, by which the checkpoint is there, and remove what is not in it.

        Raises:
            ValueError: processes have not given all of a tensor; what was there before stays.
            OSError: a file that a process has written is not there; likewise.
        """
        flat = [result for of_process in results for result in of_process]
        metadata.storage_data = {result.index: result.storage_data for result in flat}
        text = bytearray(manifest.encode(metadata))
        for of_process in results:
            _check_is_there(self._path, of_process)
        with NewFile(self._path / MANIFEST) as new, AsyncIO() as engine:
            new.reserve(len(text))
            engine.write(torch.frombuffer(text, dtype=torch.uint8), new.file).result()
            self._may_be_there = True
            new.publish()
        used = {piece.file for piece in metadata.storage_data.values()}
        for name in _data_files(self._path):
            if name not in used:
                (self._path / name).unlink(missing_ok=True)
        for name in os.listdir(self._path):
            if name.startswith(_ASIDE):
                _remove_unlocked(self._path / name)
        self._end()

    def abandon(self) -> None:
        """Remove what processes wrote, after a failure; called by one, when all have ended.

        Not if the manifest may tell of it: then the next save removes what that does not.
        """
        if self._save_id and not self._may_be_there:
            for name in _data_files(self._path):
                if name.startswith(self._save_id):
                    (self._path / name).unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        """Let others save there."""
        if self._save_id:
            _mark(self._path, self._save_id).unlink(missing_ok=True)
        self._held.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        """Return where the checkpoint is."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)


class SavesParts(DefaultSavePlanner):
    """A planner some of whose tensors are on meta, and made when they are written.

    Args:
        parts: return such a tensor in parts that follow one another, by its name.
    """

    def __init__(self, parts: Mapping[str, Callable[[], Iterable[Tensor]]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts


class Part(NamedTuple):
    """Tensors that are read together.

    Attributes:
        names: of them.
        buffers: those that have memory only from when they are read until they are taken.
        take: called when all are there; lets the memory go.
    """

    names: Sequence[str]
    buffers: Sequence[Tensor]
    take: Callable[[], None]


class InParts(DefaultLoadPlanner):
    """A planner whose tensors are read part by part, and taken from where they were read to.

    Args:
        parts: of them; all others come first.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = list(parts)

    def in_parts(self, items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
        """Yield what is to be read at once; what is there is taken before the next one."""
        by_name: dict[str, list[ReadItem]] = {}
        for item in items:
            by_name.setdefault(item.dest_index.fqn, []).append(item)
        later = {name for part in self._parts for name in part.names}
        sizes = [[b.untyped_storage().nbytes() for b in part.buffers] for part in self._parts]
        for part in self._parts:
            for buffer in part.buffers:  # nobody has written to one yet
                buffer.untyped_storage().resize_(0)
        yield [item for item in items if item.dest_index.fqn not in later]
        for part, nbytes in zip(self._parts, sizes, strict=True):
            for buffer, size in zip(part.buffers, nbytes, strict=True):
                buffer.untyped_storage().resize_(size)
            yield [item for name in part.names for item in by_name.get(name, ())]
            part.take()


class Reader(StorageReader):
    """Load by DCP what `Writer` saved: each process reads its own rows, and checks what it reads.

    Nothing that is read is run: there is no pickle in the files.

        torch.distributed.checkpoint.load(state_dict, storage_reader=zero.Reader("checkpoint"))

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path_text("zero.Reader", path))
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another folder if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds.

        Raises:
            OSError: there is no manifest, or it cannot be read.
            ValueError: the manifest is not what was written.
        """
        path = os.fspath(self._path / MANIFEST)
        with open(open_regular("zero.load", path, os.O_RDONLY), "rb") as file:
            text = file.read(_MAX_MANIFEST_BYTES)
        metadata = manifest.decode(text, path)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._path)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what `read_metadata` of the coordinator returned."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this process wants."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        parts = planner.in_parts(tensors) if isinstance(planner, InParts) else [tensors]
        with AsyncIO(threads=2) as engine:
            for part in parts:
                targets = [planner.resolve_tensor(item).detach() for item in part]
                both = list(zip(part, targets, strict=True))
                read(os.fspath(self._path), itertools.starmap(self._wanted, both), engine)
                for item, target in both:
                    planner.commit_tensor(item, target)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return bool(os.fspath(checkpoint_id))

    def _wanted(self, item: ReadItem, target: Tensor) -> Wanted:
        assert self._metadata is not None
        index = item.storage_index
        entry: Any = self._metadata.state_dict_metadata[index.fqn]
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
        return Wanted(
            self._metadata.storage_data[MetadataIndex(index.fqn, chunk.offsets)],
            tuple(chunk.sizes),
            tuple(item.storage_offsets),
            target,
            entry.properties.dtype,
            index.fqn,
        )

    def value(self, metadata: Metadata, name: str) -> Any:
        """Return a plain value of the checkpoint, with the tensors that stand apart from its text.

        Raises:
            ValueError: it has none of this name.
        """
        if MetadataIndex(name) not in metadata.storage_data:
            raise ValueError(f"zero.load: {self._path} has no {name!r}, expected it")
        piece: Piece = metadata.storage_data[MetadataIndex(name)]
        text = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
        whole = Wanted(piece, (piece.nbytes,), (0,), text, torch.uint8, name)
        with AsyncIO() as engine:
            read(os.fspath(self._path), [whole], engine)
            return loads(bytes_of(text), partial(self.tensor, metadata, engine))

    def tensor(self, metadata: Metadata, engine: AsyncIO, name: str) -> Tensor:
        """Return a whole tensor of the checkpoint.

        Raises:
            ValueError: it has none of this name.
        """
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"zero.load: {self._path} has no {name[:80]!r}, expected a tensor")
        whole = empty(entry.size, entry.properties.dtype)
        parts = []
        for chunk in entry.chunks:
            into = whole
            for i, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                into = into.narrow(i, begin, length)
            piece = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            zeros = (0,) * len(chunk.sizes)
            parts.append(Wanted(piece, tuple(chunk.sizes), zeros, into, whole.dtype, name))
        read(os.fspath(self._path), parts, engine)
        return whole

    def _value(self, item: ReadItem) -> io.BytesIO:
        """Return a plain value as DCP's planners want it, who unpickle: what is pickled here."""
        assert self._metadata is not None
        buffer = io.BytesIO()
        torch.save(self.value(self._metadata, item.storage_index.fqn), buffer)
        buffer.seek(0)
        return buffer


def _name_in_file(index: MetadataIndex) -> str:
    """Return what a chunk is called in its file; only people read it."""
    offset = ",".join(map(str, index.offset or ()))
    return f"{index.fqn}[{offset}]" if offset.strip("0,") else index.fqn


def _content(item: WriteItem, planner: SavePlanner) -> Tensor:
    data = planner.resolve_data(item)
    if item.type != WriteItemType.BYTE_IO:
        assert isinstance(data, Tensor)
        return data.detach()
    assert isinstance(data, io.BytesIO)
    text = data.getvalue()
    if not isinstance(data, Encoded):
        # DCP's planner has pickled it. What is not plain is refused here: nobody could load it.
        try:
            text = dumps(torch.load(io.BytesIO(text), weights_only=True)).encode()
        except pickle.UnpicklingError:
            classes = get_unsafe_globals_in_checkpoint(io.BytesIO(text))
            raise NotPlain(
                f"zero.Writer: {item.index.fqn!r} has {sorted(classes)} in it, expected numbers,"
                " text, tensors, and lists and dicts of them"
            ) from None
        except (NotPlain, OutOfRange) as error:
            raise type(error)(f"zero.Writer: {item.index.fqn!r}: {error}") from None
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _make_folder(path: Path) -> None:
    """Make a folder and those that it is in; their names are on the disk then."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # it can be written but not opened
            sync_folder(folder.parent)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Have a folder alone: each save removes the files that are not its own.

    A process that was forked meanwhile has the descriptor too, so closing it would not do.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # others: a file system without locks
                text = f"zero.save: {path} is written by another save, expected one at a time"
                raise BlockingIOError(error.errno, text) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _mark(path: Path, save_id: str) -> Path:
    """Return what the process that decides makes, by which others know that they see its folder."""
    return path / f"{_ASIDE}{save_id}"


def _check_is_shared(path: Path, file: str) -> None:
    """Raise OSError if this is not the folder of the process that decides; nothing is written yet.

    Args:
        path: the folder, as this process sees it.
        file: that this process was told to write.
    """
    save_id, process = _parts(file)
    if not _mark(path, save_id).exists():
        raise FileNotFoundError(
            errno.ENOENT,
            f"zero.save: folder is not the same for all processes: {os.path.abspath(path)} of"
            f" process {process} is not that of process 0, expected one folder that all see; give"
            " an absolute path on a file system that they share",
        )


def _check_is_there(path: Path, results: list[WriteResult]) -> None:
    """Raise OSError unless what a process has written can be read by the one that decides."""
    ends: dict[str, int] = {}
    for result in results:
        piece: Piece = result.storage_data
        ends[piece.file] = max(ends.get(piece.file, 0), piece.offset + piece.nbytes)
    for name, end in ends.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            found = None
        if found != end:
            what = "is not there" if found is None else f"has {found} bytes"
            raise OSError(
                errno.ENOENT if found is None else errno.EBADMSG,
                f"zero.save: {path / name} of process {_parts(name)[1]} {what}, expected the {end}"
                " bytes that were written, in one folder that is the same for all processes and"
                " that nobody else changes; there is no new checkpoint",
            )


def _parts(file: str) -> tuple[str, str]:
    """Return of which save a data file is, and of which process."""
    found = _DATA.fullmatch(file)
    assert found is not None
    return found[1], found[2]


def _remove_unlocked(path: Path) -> None:
    """Remove what a NewFile left that was killed; one that is alive has a lock on it."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _data_files(path: Path) -> Iterator[str]:
    return (name for name in os.listdir(path) if _DATA.fullmatch(name))
