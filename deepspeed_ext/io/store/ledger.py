"""The books of a tensor store: which name has which slot, which requests are under way."""

import errno
import threading
import time
from collections.abc import Mapping

from deepspeed_ext.io.engine.future import Future
from deepspeed_ext.io.store.job import Record, StoreJob
from deepspeed_ext.io.store.manifest import ManifestEntry, TensorInfo
from deepspeed_ext.io.store.space import Slot, Space


class Ledger:
    """Names, slots, requests and commits, under one lock that nobody holds while waiting.

    Each name and each commit that the disk may have owns the slots of its records, and a request
    uses one; a slot that nobody needs is free. A name whose put failed has no content: to read or
    to commit it raises that failure, until it is put again or deleted.

    Args:
        where: names the store in errors.
        space: the file; only these books use it.
        committed: what a durable store has on the disk; None: there are no commits.
    """

    def __init__(
        self, where: str, space: Space, committed: Mapping[str, Record] | None = None
    ) -> None:
        self._where = where
        self._space = space
        self._records: dict[str, Record] = dict(committed or {})
        self._failed: dict[str, BaseException] = {}
        self._pending: dict[StoreJob, None] = {}  # the oldest first
        self._abandoned: dict[StoreJob, None] = {}  # those of them that no Future waits for
        self._commits: list[dict[str, Record]] = []  # the last one counts, or if in doubt another
        self._closed = False
        # Reentrant, as the collector may drop a store, which waits, in the middle of anything.
        self._lock = threading.RLock()
        for record in self._records.values():
            _own(record)
        if committed is not None:
            self._commits.append(self._copy())

    # Requests

    def job(self, name: str, verb: str) -> StoreJob:
        """Return a request that is in no book yet, so that its owner has it before these do."""
        return StoreJob(name, verb, self._settle)

    def begin_put(self, job: StoreJob, info: TensorInfo) -> None:
        """Make a tensor that is yet to be written by this request the content of its name.

        Requests on what it may overwrite are waited for, before the file would have to grow.

        Raises:
            OSError: there is no space for it; the name keeps what it has.
        """
        while True:
            with self._lock:
                self._check_open()
                old = self._records.get(job.name)
                try:
                    slot, before = self._place(old, job.name, info.nbytes)
                except OSError:
                    if not self._pending:
                        raise
                    before = list(self._pending)  # their slots may be free after that
                if not before:
                    job.record = Record(job.name, info, slot, writing=job)
                    self._replace(job, old)
                    return
            for other in before:
                other.wait()

    def begin_get(self, job: StoreJob) -> StoreJob | None:
        """Make this request a read of what its name has now; return the write that comes first."""
        with self._lock:
            job.record = self._find(job.name)
            self._begin(job)
            return job.record.writing

    def abandon(self, job: StoreJob, transfer: Future | None, error: BaseException) -> None:
        """Give up a request, in whatever state it is; the name of a put has no content then.

        Nobody has a Future of it: `settle_abandoned`, `delete` and `drain` wait for its transfer.
        """
        with self._lock:
            if job.settled or job not in self._pending:
                return
            self._abandoned[job] = None
            job.start(transfer, error)
            record = job.record
            if record.writing is job and self._records.get(record.name) is record:
                assert job.error is not None
                self._fail(record, job.error)
        if transfer is None:
            job.wait()

    def settle_abandoned(self, timeout: float | None) -> bool:
        """Wait for what was given up; tell whether it has ended in so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            jobs = list(self._abandoned)
        for job in jobs:
            if end is None:
                job.wait()
            elif not job.wait(max(end - time.monotonic(), 0.0)):
                return False
        return True

    def drain(self) -> None:
        """Wait for every request, however it ends."""
        while True:
            with self._lock:
                pending = list(self._pending)
            if not pending:
                return
            for job in pending:
                job.wait()

    # Names

    def info(self, name: str) -> TensorInfo:
        """Return what is known about the content of a name; KeyError, or why its put failed."""
        with self._lock:
            return self._find(name).info

    def offset_of(self, name: str) -> int:
        """Return where the content of a name begins in the file, once it is there."""
        with self._lock:
            record = self._find(name)
            writing = record.writing
        if writing is not None:
            writing.wait()
            writing.check()
        return record.offset

    def has(self, name: object) -> bool:
        """Tell whether a name has content."""
        with self._lock:
            self._check_open()
            return name in self._records

    def names(self) -> list[str]:
        """Return the names that have content, the oldest first."""
        with self._lock:
            self._check_open()
            return list(self._records)

    def delete(self, name: str) -> None:
        """Forget a name; its slot is free when the last request on it is done."""
        with self._lock:
            self._check_open()
            if self._failed.pop(name, None) is None:
                record = self._find(name)
                del self._records[name]
                self._disown(record)
            abandoned = [job for job in self._abandoned if job.name == name]
        for job in abandoned:
            job.wait()

    def reserve(self, nbytes: int, in_parts: bool) -> None:
        """Make room for nbytes in one piece, or in parts."""
        with self._lock:
            self._check_open()
            self._space.reserve(nbytes, "reserve", in_parts)

    def stats(self) -> dict[str, int]:
        """Count tensors, requests and bytes."""
        with self._lock:
            self._check_open()
            return {
                "tensors": len(self._records),
                "in_flight": len(self._pending),
                "file_bytes": self._space.end,
                "used_bytes": self._space.used,
                "free_bytes": self._space.end - self._space.used,
                "disk_free_bytes": self._space.disk_free(),
            }

    def close(self) -> None:
        """Refuse further calls."""
        with self._lock:
            self._closed = True

    def cut_unused(self) -> None:
        """Leave to the disk what is free at the end of the file and was not reserved."""
        with self._lock:
            self._space.cut_unused()

    def give_back(self) -> None:
        """Drop all that is not committed, and cut the file off behind the rest."""
        with self._lock:
            for record in self._records.values():
                self._disown(record)
            self._records.clear()
            self._space.trim()

    # Commits

    def snapshot(self) -> dict[str, Record] | None:
        """Return what a commit has to write, kept from being overwritten; None: nothing is new.

        Raises:
            OSError: a name has no content because its put failed.
        """
        with self._lock:
            self._check_open()
            for name, error in self._failed.items():
                raise self._incomplete(name, error)
            if len(self._commits) == 1 and self._commits[0] == self._records:
                return None
            return self._copy()

    def wait_for(self, snapshot: Mapping[str, Record]) -> dict[str, ManifestEntry]:
        """Wait for the writes of a snapshot and return its entries.

        Raises:
            OSError: one has failed.
        """
        for name, record in snapshot.items():
            job = record.writing
            if job is not None:
                job.wait()
                if job.error is not None:
                    raise self._incomplete(name, job.error)
        return {
            name: ManifestEntry(record.info, record.offset) for name, record in snapshot.items()
        }

    def release(self, snapshot: Mapping[str, Record]) -> None:
        """Give up a snapshot that no disk has seen."""
        with self._lock:
            for record in snapshot.values():
                self._disown(record)

    def publishing(self, snapshot: dict[str, Record]) -> None:
        """Keep a snapshot: from here on the disk may have it, or the one before."""
        with self._lock:
            self._commits.append(snapshot)

    def published(self) -> None:
        """Free what only earlier commits need: the disk has the last one for certain."""
        with self._lock:
            while len(self._commits) > 1:
                for record in self._commits.pop(0).values():
                    self._disown(record)

    def distrust(self, error: OSError) -> None:
        """Take the content of all that is not committed as lost.

        After a failed fsync the kernel may drop what it could not write, and the next one succeeds.
        """
        with self._lock:
            committed = {record for commit in self._commits for record in commit.values()}
            for record in [r for r in self._records.values() if r not in committed]:
                self._fail(record, error)

    # With the lock held

    def _settle(self, job: StoreJob) -> None:
        with self._lock:
            if job.settled:
                return
            # Ctrl-C may come in between: all of it can be done again, until the last of it is.
            self._pending.pop(job, None)
            self._abandoned.pop(job, None)
            record = job.record
            if record.writing is job:
                if job.error is None:
                    record.writing = None
                elif self._records.get(record.name) is record:
                    self._fail(record, job.error)
            if record.slot:
                record.slot.users.discard(job)
                self._space.release(record.slot)
            job.settled = True

    def _place(
        self, old: Record | None, name: str, nbytes: int
    ) -> tuple[Slot | None, list[StoreJob]]:
        """Return a slot, or the requests to wait for before asking again."""
        if nbytes == 0:
            return None, []
        own = old.slot if old and old.slot and old.slot.can_be(nbytes) else None
        if own and not own.users:
            return own, []
        slot = self._space.fit(nbytes)
        if slot is None and own:
            return None, list(own.users)
        if slot is None:
            self._space.grow(nbytes, f"put of {name!r}", ahead=True)
            slot = self._space.fit(nbytes)
        return slot, []

    def _replace(self, job: StoreJob, old: Record | None) -> None:
        record = job.record
        self._begin(job)
        _own(record)
        self._records[record.name] = record
        self._failed.pop(record.name, None)
        if old is not None:
            self._disown(old)

    def _begin(self, job: StoreJob) -> None:
        self._pending[job] = None
        if job.record.slot:
            job.record.slot.users.add(job)

    def _find(self, name: str) -> Record:
        self._check_open()
        if name in self._failed:
            # Without the frames of whoever was told before, which it would keep alive.
            raise self._failed[name].with_traceback(None)
        if name not in self._records:
            raise KeyError(f"TensorStore: {name!r} is not in {self._where}")
        return self._records[name]

    def _fail(self, record: Record, error: BaseException) -> None:
        del self._records[record.name]
        self._failed[record.name] = error
        self._disown(record)

    def _copy(self) -> dict[str, Record]:
        for record in self._records.values():
            _own(record)
        return dict(self._records)

    def _disown(self, record: Record) -> None:
        if record.slot:
            record.slot.owners -= 1
            self._space.release(record.slot)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"TensorStore: {self._where} is closed, expected an open store")

    def _incomplete(self, name: str, error: BaseException) -> OSError:
        code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        return OSError(
            code,
            f"TensorStore: commit of {self._where}: {name!r} has no content, expected some; put it"
            f" again or delete it ({error})",
        )


def _own(record: Record) -> None:
    if record.slot:
        record.slot.owners += 1
