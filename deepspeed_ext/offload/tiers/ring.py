"""Host memory for a few pieces of state: they are read ahead, stepped there and written behind."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.io import PinnedBuffer
from deepspeed_ext.offload.copies import Event
from deepspeed_ext.offload.tiers.disk_state import DiskState
from deepspeed_ext.offload.tiers.records import Records, Transfer
from deepspeed_ext.offload.worker import ThisProcess
from deepspeed_ext.op_builder.log import logger

_LENT = 4  # slabs, as a row of writes wants: one is filled while others are written

Place = tuple[DiskState, int]  # a piece of a bucket's state, by its number


class _Read(NamedTuple):
    """A piece in memory, or on its way there."""

    slab: Tensor
    future: Transfer | None


class _Write(NamedTuple):
    """A piece on its way to the disk."""

    slab: Tensor
    place: Place
    future: Transfer
    sent: Event | None  # when the weights beside it are on the device


class Ring:
    """Slabs of host memory, each for one piece of state and what is stepped with it.

    Pieces are wanted in the same order in each step, which `follow` is told. As many as there are
    slabs for are read before anybody asks for them.

    Args:
        records: has the pieces.
        slab_bytes: of a slab.
        slabs: how many there are, 3 or more: one each is read, stepped and written.

    Attributes:
        error: why nothing can be stepped any more: some pieces are of one step, some of another.
        bytes_read: from the disk, so far.
        bytes_written: to it.
        ahead: pieces that were there, or on their way, when they were wanted.
    """

    def __init__(self, records: Records, slab_bytes: int, slabs: int) -> None:
        self.records, self.slab_bytes = records, slab_bytes
        self._lock = threading.RLock()  # hooks of backward read ahead while the worker steps
        self._turn = threading.RLock()
        self._count = slabs
        self._free: list[Tensor] | None = None
        self._reads: dict[Place, _Read] = {}  # the oldest first
        self._writes: deque[_Write] = deque()
        self._order: Sequence[Place] = ()
        self._index: dict[Place, int] = {}
        self._next = 0  # in that, to be read
        self._taken: Tensor | None = None  # the slab that is stepped
        self._process = ThisProcess()
        self.error: BaseException | None = None
        self._is_told = False  # the error was raised
        self.bytes_read = self.bytes_written = self.ahead = self.taken = 0
        self.begin = time.monotonic()

    def follow(self, order: Sequence[Place]) -> None:
        """Take note of the pieces that a step wants, in their order."""
        with self._lock:
            self._drop_reads()
            self._order, self._next = order, 0
            self._index = {place: i for i, place in enumerate(order)}

    def settle(self) -> None:
        """Wait until all is written, and read nothing ahead: somebody looks at state, or writes.

        Raises:
            RuntimeError: it is not, so nobody is to look; or this is a fork.
        """
        self._process.check()
        with self._lock:
            self._drop_reads()
            self._next = len(self._order)
            self.finish()
        self.check()

    def start_anew(self) -> None:
        """Take note that a step is over: the first piece will be wanted next."""
        with self._lock:
            self._drop_reads()
            self._next = 0
            self.run_ahead()

    def run_ahead(self) -> None:
        """Begin to read the pieces that come next, as far as there is memory for them."""
        if self._process.is_foreign():
            return
        with self._lock:
            self._collect()
            while self._next < len(self._order) and self._slabs() and self.error is None:
                place = self._order[self._next]
                if place[1] in place[0].exposed or self._is_written_now(place):
                    return
                if place not in self._reads:
                    with self._in_one_go():
                        self._reads[place] = self._read(place)
                self._next += 1

    def take(self, place: Place) -> Tensor:
        """Return the slab with a piece in it.

        Raises:
            OSError: it could not be read, or another one not be written.
        """
        with self._lock:
            self.check()
            found = self._reads.pop(place, None)
            self.ahead += found is not None
            self.taken += 1
            if found is None:
                self._pass(place)
                found = self._read(place)
            self._taken = found.slab
            self.run_ahead()
        if found.future is not None:
            found.future.result()
        return found.slab

    def give_back(self, place: Place, slab: Tensor, sent: Event | None) -> None:
        """Write a piece behind, and use its slab for another one when that is done.

        Args:
            place: of the piece.
            slab: with the piece.
            sent: what else is to be awaited: weights from the same slab, on their way.
        """
        state, k = place
        with self._lock:
            record = slab[: state.shape.nbytes]
            future = self.records.put(state.begin_put(k), record)
            state.on_disk[k] = True  # who reads it waits for that
            state.exposed.discard(k)  # who looks at it anew, too
            self.bytes_written += record.nbytes
            self._writes.append(_Write(slab, place, future, sent))
            self._taken = None
            self.run_ahead()

    @contextmanager
    def lent(self) -> Iterator[list[Tensor]]:
        """Lend some slabs, when all is written; what was read ahead last may be read again."""
        with self._lock:
            self.finish()
            self.check()
            slabs = self._slabs()
            while self._reads and len(slabs) < min(_LENT, self._count):
                place = next(reversed(self._reads))
                self._next = min(self._next, self._index[place])
                self._drop(place)
            lent, slabs[:] = list(slabs), []
        try:
            yield list(lent)
        finally:
            with self._lock:
                self._slabs().extend(lent)

    def put_back(self) -> None:
        """Use the slab that was taken for another piece: nothing was done with this one."""
        with self._lock:
            if self._taken is not None:
                self._slabs().append(self._taken)
            self._taken = None

    def fail(self, error: BaseException) -> None:
        """Refuse to go on, as an error that is raised has come in the middle of a step."""
        self.error = self.error or error
        self._is_told = True

    def check(self) -> None:
        """Raise what went wrong with what was written behind, as far as that is known.

        Raises:
            RuntimeError: something did.
        """
        if self._process.is_foreign():
            return
        with self._lock:
            self._collect()
        if self.error is not None:
            self._is_told = True
            raise refusal(self.error, self.records.store.durable) from self.error

    def turn(self) -> AbstractContextManager[object]:
        """Let one thread at a time step or commit. A fork, which is refused, waits for none."""
        return nullcontext() if self._process.is_foreign() else self._turn

    def check_process(self) -> None:
        """Raise RuntimeError if this is a fork."""
        self._process.check()

    def check_open(self) -> None:
        """Raise RuntimeError if state cannot be looked at any more, or this is a fork."""
        self._process.check()
        if self.records.store.closed:
            raise RuntimeError(
                "OffloadOptimizer: state is read after close(), expected before it with"
                " durable=True: the folder may be another's by now"
            )

    def finish(self) -> None:
        """Wait until all is written; the first that went wrong is the error from then on."""
        with self._lock:
            while self._writes:
                self._collect_one()

    def close(self) -> None:
        """Wait until nothing is under way, let go of the memory, and of what others could open."""
        with self._lock:
            self._drop_reads()
            self._next = len(self._order)
            self.finish()
            self._free = None
        self.records.close()
        if self.error is not None and not self._is_told:  # nobody is left to raise it
            self._is_told = True
            logger.error("%s", refusal(self.error, self.records.store.durable), exc_info=self.error)

    def stats(self) -> dict[str, float]:
        """Return bytes moved, and how often the disk was ahead."""
        seconds = time.monotonic() - self.begin
        return {
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_written_per_day": int(self.bytes_written / seconds * 86400),
            "read_ahead": self.ahead / max(self.taken, 1),
        }

    # With the lock held

    @contextmanager
    def _in_one_go(self) -> Iterator[None]:
        """Do what Ctrl-C must not break off: nobody would know whose a slab is."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _slabs(self) -> list[Tensor]:
        if self._free is None:
            buffers = [PinnedBuffer(self.slab_bytes) for _ in range(self._count)]
            self._free = [buffer.tensor() for buffer in buffers]
        return self._free

    def _pass(self, place: Place) -> None:
        """See that there is a free slab for a piece, which was not read ahead."""
        self._next = self._index.get(place, self._next - 1) + 1
        while not self._slabs():
            if self._writes:
                self._collect_one()
            else:
                self._drop(next(iter(self._reads)))
        self.check()

    def _read(self, place: Place) -> _Read:
        state, k = place
        while self._is_written_now(place):
            self._collect_one()
        slab = self._slabs().pop()
        record = slab[: state.shape.nbytes]
        try:
            if k in state.exposed:
                state.copy_shown(k, record)
            elif state.on_disk[k]:
                self.bytes_read += record.nbytes
                return _Read(slab, self.records.get(state.name(k), record))
            else:
                record.zero_()
        except BaseException:
            self._slabs().append(slab)
            raise
        return _Read(slab, None)

    def _is_written_now(self, place: Place) -> bool:
        return any(write.place == place for write in self._writes)

    def _drop_reads(self) -> None:
        for place in list(self._reads):
            self._drop(place)

    def _drop(self, place: Place) -> None:
        slab, future = self._reads[place]
        if future is not None:
            future.exception()  # nobody wants it
        with self._in_one_go():
            del self._reads[place]
            self._slabs().append(slab)

    def _collect(self) -> None:
        """Take back the slabs of pieces that are written by now."""
        while self._writes:
            write = self._writes[0]
            if not write.future.done() or not (write.sent is None or write.sent.query()):
                return
            self._collect_one()

    def _collect_one(self) -> None:
        write = self._writes[0]  # until it is over, whatever comes in between
        state, k = write.place
        try:
            write.future.result()
            state.show(k)
        except Exception as error:
            self.error = self.error or error
        if write.sent is not None:
            write.sent.synchronize()
        with self._in_one_go():
            self._writes.popleft()
            self._slabs().append(write.slab)


def refusal(error: BaseException, is_durable: bool = False) -> RuntimeError:
    """Return what an optimizer says that cannot go on, and whether it can be resumed."""
    kind = type(error).__name__
    if isinstance(error, Exception):
        what = f"state on disk is {kind} ({error}), expected a disk that works"
    else:
        what = f"a step was broken off by {kind}, expected to be over"
    source = "with resume=True" if is_durable else "from a checkpoint"
    return RuntimeError(
        f"OffloadOptimizer: {what}: weights and state are of two steps by now; make the optimizer"
        f" anew {source}"
    )


def views_in(memory: Tensor, begin: int, like: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return flat views in a slab, one for each of some tensors, and where they end."""
    views = []
    for tensor in like:
        views.append(memory[begin : begin + tensor.nbytes].view(tensor.dtype))
        begin += tensor.nbytes
    return views, begin
