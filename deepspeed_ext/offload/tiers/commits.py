"""Commits: what a durable store has of one step, the same step in all processes, as a whole."""

import contextlib
import errno
import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_ext.offload.tiers.contents import Contents, names_in
from deepspeed_ext.offload.tiers.records import Records
from deepspeed_ext.offload.tiers.ring import Ring
from deepspeed_ext.offload.tiers.stream import StreamInfo, StreamWriter

FORMAT = 1
_PREFIX = "commit."
_OURS = re.compile(r"\d+\.\d+\.[01]|commit\.\d+(\.\d+)?|whole")  # names of records
_KEPT = {"Tensor", "int", "float", "bool", "str", "NoneType", "bytes", "list", "tuple", "set"}
_WHOLE = "whole"  # the newest commit that all processes are known to have

Describe = Callable[[StreamWriter], Contents]


class Processes(NamedTuple):
    """The processes that commit together.

    Attributes:
        rank: of this one.
        size: how many there are.
    """

    rank: int
    size: int

    @staticmethod
    def now() -> "Processes":
        """Return what torch.distributed has, or one process."""
        if not (dist.is_available() and dist.is_initialized()):
            return Processes(0, 1)
        return Processes(dist.get_rank(), dist.get_world_size())

    def gathered(self, value: Any) -> list[Any]:
        """Return what each process has, by rank. All of them call this."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found


class Commit(NamedTuple):
    """A commit in this process.

    Attributes:
        number: 1 is the first.
        names: of the records that it has.
    """

    number: int
    names: list[str]


class Commits:
    """What was committed, and what comes next.

    Killed at any moment, a process has its last commit. While a commit is under way, some processes
    have it and others have not: so each keeps the one before until all have the newer one. They go
    on from the newest that all have.

    Args:
        title: of the optimizer, for errors.
        records: of a durable store.
        resume: whether to go on from a commit, if there is one.

    Attributes:
        contents: of the commit to go on from; None: there is none, or it was taken up.
        extra: what the user had committed with it; None: there is no commit.
        options: of groups, in the last commit.
        nbytes: written for commits so far, beside state that is stepped on disk.

    Raises:
        FileExistsError: there is a commit, but nobody wants to go on from it.
        OSError: EBADMSG: some processes lack what others have.
        ValueError: it is of other processes than these.
    """

    def __init__(self, title: str, records: Records, resume: bool) -> None:
        self._title, self._records = title, records
        self.processes = Processes.now()
        self._commits: list[Commit] = []  # the oldest first
        self.contents: Contents | None = None
        self.extra: dict[str, Any] | None = None
        self.options: list[dict[str, Any]] = []
        self.nbytes = 0
        number = self._whole = self._agreed(resume)  # all have it
        if number:
            found = self._read(number)
            self.contents, self.extra = found["contents"], found["extra"]
            self.options = found["contents"]["groups"]
            self._commits.append(Commit(number, [_name(number), *names_in(found["contents"])]))
            records.hold(self._commits[0].names)
        self._keep_only(self._commits[0].names if number else [])

    def write(self, ring: Ring, describe: Describe, extra: dict[str, Any]) -> None:
        """Commit; all processes call this.

        Args:
            ring: lends its memory.
            describe: writes to a stream, and returns what is where.
            extra: goes with it.

        Raises:
            TypeError: extra has an object that could not be read again.
            OSError: the disk refuses; the last commit is still there, or this one, as `extra` says.
            RuntimeError: another process could not commit; likewise.
        """
        made = Commit(1 + max((commit.number for commit in self._commits), default=0), [])
        failure: Exception | None = None
        try:
            kept = self._checked(extra)
            self._forget_older()
            self._put(made, ring, describe, kept)
            self._records.store.commit()
        except Exception as error:
            failure = error
        except BaseException:
            self._drop(made)
            raise
        text = None if failure is None else f"process {self.processes.rank}: {failure}"
        failures = [text for text in self.processes.gathered(text) if text is not None]
        if failures:
            self._drop(made)
            raise failure or RuntimeError(
                f"{self._title}: commit is refused by {failures[0]}, expected by none"
            )
        self._commits.append(made)
        self.extra, self.contents = kept, None
        self._forget_older()

    def _put(self, made: Commit, ring: Ring, describe: Describe, extra: dict[str, Any]) -> None:
        name = _name(made.number)
        with ring.lent() as slabs:
            stream = StreamWriter(self._records, slabs, name)
            try:
                contents = describe(stream)
            except BaseException:
                stream.abandon()
                made.names.extend(stream.names)
                raise
        made.names.extend(stream.names)
        on_disk = names_in(contents)[len(stream.names) :]
        self._records.hold(on_disk)
        made.names.extend(on_disk)
        document = {
            "format": FORMAT,
            "processes": self.processes.size,
            "contents": contents,
            "extra": extra,
        }
        text = io.BytesIO()
        torch.save(document, text)
        self._records.hold([name])
        made.names.append(name)
        record = torch.frombuffer(text.getbuffer(), dtype=torch.uint8)
        self._records.put(name, record).result()
        self.nbytes += StreamInfo(*contents["stream"]).nbytes + record.nbytes

    def _checked(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of what the user adds, as it will be read."""
        found = {}
        for key, value in extra.items():
            text = io.BytesIO()
            try:
                torch.save(value, text)
                text.seek(0)
                found[key] = torch.load(text, weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
                raise TypeError(
                    f"{self._title}.commit: {key} is or has a {_culprit(value)}, expected what"
                    " torch.load(weights_only=True) reads: tensors, numbers, text, and lists and"
                    " dicts of these"
                ) from error
        return found

    def _forget_older(self) -> None:
        """Give the room of older commits to the next one: all processes have the newest."""
        newest = self._commits[-1].number if self._commits else 0
        if newest == self._whole:
            return
        self._records.store.put(_WHOLE, torch.tensor([newest], device="cpu"))
        for commit in self._commits[:-1]:
            self._records.release(commit.names)
        del self._commits[:-1]
        self._records.store.commit()
        self._whole = newest

    def _drop(self, made: Commit) -> None:
        """Forget a commit that not all have."""
        self._records.release(made.names)
        with contextlib.suppress(OSError):  # the next one does it, or says why not
            self._records.store.commit()

    # What is there when it is opened

    def _agreed(self, resume: bool) -> int:
        """Return the number of the newest commit that all processes have, 0 if there is none."""
        store = self._records.store
        strangers = [name for name in store.names() if not _OURS.fullmatch(name)]
        if strangers:
            raise FileExistsError(
                errno.EEXIST,
                f"{self._title}: nvme_path has {strangers[0]!r} in the store {store.path}, expected"
                " commits or nothing",
            )
        mine = sorted(map(_number, store.names()))
        mine = [number for number in mine if number]
        whole = int(store.get(_WHOLE)) if _WHOLE in store else 0
        count = self._read(mine[-1])["processes"] if mine else 0
        found = self.processes.gathered((mine, whole, count))
        if not resume and any(numbers for numbers, _, _ in found):
            raise FileExistsError(
                errno.EEXIST,
                f"{self._title}: nvme_path is {store.path} with a commit, expected resume=True to"
                " go on from it, or a folder without one",
            )
        counts = {count for _, _, count in found} - {0}
        if counts - {self.processes.size}:
            raise ValueError(
                f"{self._title}: nvme_path has commits of {max(counts)} processes, expected"
                f" {self.processes.size} as there are; zero.save and zero.load go between numbers"
            )
        common = set.intersection(*(set(numbers) for numbers, _, _ in found))
        number, needed = max(common, default=0), max(whole for _, whole, _ in found)
        if number < needed:
            ranks = [rank for rank, (numbers, _, _) in enumerate(found) if needed not in numbers]
            raise OSError(
                errno.EBADMSG,
                f"{self._title}: nvme_path of process {ranks[0]} has no commit {needed}, expected"
                " it as all had it",
            )
        return number

    def _read(self, number: int) -> dict[str, Any]:
        store = self._records.store
        record = store.get(_name(number))
        found: dict[str, Any] = torch.load(io.BytesIO(record.numpy().tobytes()), weights_only=True)
        if found["format"] != FORMAT:
            raise ValueError(
                f"{self._title}: nvme_path has a commit of format {found['format']}, expected"
                f" {FORMAT}"
            )
        return found

    def _keep_only(self, names: list[str]) -> None:
        """Delete what a commit that not all have, or state after the last one, has left behind."""
        store = self._records.store
        others = set(store.names()) - set(names) - {_WHOLE}
        for name in others:
            store.delete(name)
        if others:
            store.commit()


def _name(number: int) -> str:
    return f"{_PREFIX}{number}"


def _number(name: str) -> int:
    """Return the number of the commit that a record describes, 0 if it describes none."""
    number = name.removeprefix(_PREFIX)
    return int(number) if number != name and number.isdecimal() else 0


def _culprit(value: object) -> str:
    """Return the name of the first class in a value that is none of those that are kept."""
    items: Iterable[object] = ()
    if isinstance(value, Mapping):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        items = value
    names = map(_culprit, items)
    return next((name for name in names if name not in _KEPT), type(value).__name__)
