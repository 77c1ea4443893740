"""The records of a store, which pieces of state and commits hold, and give back."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future as Begun, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from deepspeed_ext.io import Future, TensorStore
from deepspeed_ext.io.file_map import file_map
from deepspeed_ext.offload.copies import FROM_DISK, TO_DISK, Recorder


class Transfer(Protocol):
    """A record on its way to or from the disk."""

    def done(self) -> bool:
        """Tell whether it is over."""

    def result(self) -> Any:
        """Wait until it is, and raise what went wrong."""

    def exception(self) -> BaseException | None:
        """Wait until it is, and return that."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> object:
        """Call a function when it is over."""


class Records:
    """Names in a store, each with as many holders as it has; one that has none is deleted.

    Of a durable store, checksums are taken in threads of their own: one looks at what was read, one
    at what is written while that goes on, beside the thread that steps. One of a scratch store does
    as it is asked, at once.

    Args:
        store: has the records; it is closed with this.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self._recorder: Recorder | None = None
        self._unnoted = 0  # transfers that it is to be told of when they are over
        self._noted_all = threading.Condition()
        self._holders: Counter[str] = Counter()
        # Reentrant: the collector may drop state, which gives records back, in the middle of it.
        self._lock = threading.RLock()
        self._serial = 1 + max(map(_serial_of, store.names()), default=0)
        self._maps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._putting = self._checking = None
        if store.durable:
            self._putting = ThreadPoolExecutor(1, "checksums of writes")
            self._checking = ThreadPoolExecutor(1, "checksums of reads")

    def serial(self) -> int:
        """Return a number that begins no name so far: `<number>.`."""
        with self._lock:
            self._serial += 1
            return self._serial

    def hold(self, names: Iterable[str]) -> None:
        """Keep records, which may be still to be put."""
        with self._lock:
            self._holders.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Let go of records that were held."""
        with self._lock:
            for name in names:
                self._holders[name] -= 1
                if self._holders[name] > 0:
                    continue
                del self._holders[name]
                if not self.store.closed:
                    with suppress(KeyError):  # nothing was put under it
                        self.store.delete(name)

    def is_shared(self, name: str) -> bool:
        """Return whether a record has several holders, so that none may write to it."""
        return self._holders[name] > 1

    def put(self, name: str, record: Tensor) -> Transfer:
        """Start to write a record, which must not change until it is done."""
        if self._putting is None:
            return self._noted(TO_DISK, self.store.put_async(name, record))
        return self._noted(TO_DISK, _Put(self._putting.submit(self.store.put_async, name, record)))

    def get(self, name: str, out: Tensor) -> Transfer:
        """Start to read a record; one that is written now is to be awaited first."""
        future = self._noted(FROM_DISK, self.store.get_async(name, out))
        return future if self._checking is None else self._checking.submit(future.result)

    def _noted(self, what: str, transfer: Transfer) -> Transfer:
        if (recorder := self._recorder) is not None:
            note = partial(recorder.note, what, perf_counter())
            with self._noted_all:
                self._unnoted += 1
            transfer.add_done_callback(lambda _: self._note(note))
        return transfer

    def _note(self, note: Callable[[float], None]) -> None:
        try:
            note(perf_counter())
        finally:
            with self._noted_all:
                self._unnoted -= 1
                self._noted_all.notify_all()

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder of transfers that begin from now on; None waits for those, and ends it.

        It is told by a thread of the engine, which may come after whoever has awaited a transfer.
        """
        self._recorder = recorder
        if recorder is None and not self.store.closed:  # as it is in a fork, too
            with self._noted_all:
                self._noted_all.wait_for(lambda: self._unnoted == 0)

    def verify(self, names: Sequence[str]) -> None:
        """Read records of a durable store, one ahead of the other, and compare their checksums.

        Raises:
            OSError: EBADMSG: one is not what was put.
        """
        ahead: Future | None = None
        for name in names:
            under_way, ahead = ahead, self.store.get_async(name)
            if under_way is not None:
                under_way.result()
        if ahead is not None:
            ahead.result()

    def file_map(self, nbytes: int) -> tuple[Any, Tensor]:
        """Return memory in which records can be shown; see `deepspeed_ext.io.file_map`."""
        made, memory = file_map(nbytes)
        self._maps.add(made)
        return made, memory

    def close(self) -> None:
        """Close a durable store, so that another one can be opened where it is.

        What shows records of it shows zeros from now on: the file is another's to write.
        """
        if not self.store.durable:
            return
        for thread in (self._putting, self._checking):
            if thread is not None:
                thread.shutdown()
        for made in list(self._maps):
            made.hide()
        self.store.close()


class _Put:
    """A write that a thread begins."""

    def __init__(self, begun: "Begun[Future]") -> None:
        self._begun = begun

    def done(self) -> bool:
        if not self._begun.done():
            return False
        return self._begun.exception() is not None or self._begun.result().done()

    def result(self) -> Any:
        return self._begun.result().result()

    def exception(self) -> BaseException | None:
        return self._begun.exception() or self._begun.result().exception()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        def when_begun(begun: "Begun[Future]") -> None:
            if begun.exception() is None:
                begun.result().add_done_callback(fn)
            else:
                fn(self)

        self._begun.add_done_callback(when_begun)


def _serial_of(name: str) -> int:
    begin = name.partition(".")[0]
    return int(begin) if begin.isdecimal() else 0
