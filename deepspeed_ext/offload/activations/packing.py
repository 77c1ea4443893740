"""The two hooks of autograd: what it saves goes to a place, and comes back from there."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.offload.activations.ahead import Order
from deepspeed_ext.offload.activations.forms import (
    Counter,
    can_leave,
    form_of,
    span_of,
    storage_bytes,
)
from deepspeed_ext.offload.activations.kept import (
    Ended,
    Kept,
    Leaving,
    Packed,
    Place,
    Staying,
    staying,
)
from deepspeed_ext.offload.activations.tracing import untraced_where_compiled
from deepspeed_ext.torch_internals.tensors import base_of, storage_id, version_of

_LEAVING = 2  # times the bytes of the largest one are on their way before streams wait


class Packing:
    """Packs and unpacks what autograd saves, in any thread.

    Args:
        place: where bytes rest.
        budget: most bytes there; None: any.
        min_bytes: storages of fewer bytes stay.
        kind: of tensors that leave.
    """

    def __init__(
        self, place: Place, budget: int | None, min_bytes: int, kind: type[Tensor] = Tensor
    ) -> None:
        self._place = place
        self._kind = kind
        self._instead: Packing | None = None
        self._budget = budget
        self._min_bytes = max(min_bytes, 1)
        self._lock = threading.RLock()  # garbage that is collected meanwhile may have hooks, too
        self._known: dict[int, list[weakref.ref[Kept]]] = {}
        self._order = Order()
        self._leaving: deque[weakref.ref[Kept]] = deque()
        self._largest = 0
        # Objects go in the middle of anything: they only leave a note.
        self._ended: deque[Ended] = deque()
        self._bytes = self._peak = self._bytes_out = self._stayed = 0

    def stats(self) -> dict[str, int]:
        """Return bytes and counts; see SavedTensors.stats."""
        with self._lock:
            self._settle()
            return {
                "bytes": self._bytes,
                "peak": self._peak,
                "bytes_out": self._bytes_out,
                "stayed": self._stayed,
                "largest": self._largest,
                **self._order.counts,
            }

    @contextmanager
    def replaced(self, place: Place, kind: type[Tensor]) -> Iterator["Packing"]:
        """Let another one pack meanwhile, with the same budget.

        Args:
            place: of its bytes.
            kind: of tensors that leave.
        """
        self._instead = Packing(place, self._budget, self._min_bytes, kind)
        try:
            yield self._instead
        finally:
            self._instead = None

    def can_leave(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of those that leave, whatever its storage has."""
        return can_leave(tensor, (self._instead or self)._kind)

    @untraced_where_compiled
    def pack(self, tensor: Tensor) -> Packed | Staying:
        """Return what autograd is to hold in place of a tensor that it saves."""
        if self._instead is not None:
            return self._instead.pack(tensor)
        if not self._may_leave(tensor):
            return staying(tensor)
        begin, end = span_of(tensor)
        with self._lock, torch.no_grad():
            self._settle()
            kept = self._known_one(tensor, begin, end) or self._new(tensor, begin, end)
            return kept.pack(form_of(tensor))

    @untraced_where_compiled
    def unpack(self, packed: Packed | Staying) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written since it was saved.
        """
        if isinstance(packed, Staying):
            return packed.unpack()
        kept = packed.kept
        kept.counter.check()
        with self._lock, torch.no_grad():
            back, packed.back = packed.back, None
            if back is None or not back.is_usable():
                back = self._order.back(kept)
                packed.back = None
            self._settle()
            self._order.hasten()
            self._let_go_of_what_has_left()
            back.wait()
            return packed.form.of(back.memory)

    def _may_leave(self, tensor: Tensor) -> bool:
        if not can_leave(tensor, self._kind):
            return False
        return tensor.untyped_storage().nbytes() >= self._min_bytes

    def _known_one(self, tensor: Tensor, begin: int, end: int) -> Kept | None:
        owner, version = _owner_of(tensor), version_of(tensor)
        for kept in self._kept_of(storage_id(tensor.untyped_storage())):
            if kept.has(owner, version, begin, end):
                return kept
        return None

    def _kept_of(self, storage: int) -> Iterator[Kept]:
        return (kept for ref in self._known.get(storage, ()) if (kept := ref()) is not None)

    def _new(self, tensor: Tensor, begin: int, end: int) -> Kept:
        """Bring a storage away, or of a small part that alone."""
        storage = tensor.untyped_storage()
        if 2 * (end - begin) >= storage.nbytes():
            begin, end = 0, storage.nbytes()
        nbytes = end - begin
        has_room = self._budget is None or self._bytes + nbytes <= self._budget
        if has_room:
            self._check_stream(tensor)
            self._largest = max(self._largest, nbytes)
            self._let_go_of_what_has_left(nbytes)
        kept = Kept(
            StorageWeakRef(storage),
            _owner_of(tensor),
            Counter(tensor),
            begin,
            storage_bytes(tensor, begin, end),
            self._place if has_room else None,
            self._ended,
        )
        if has_room:
            self._bytes += nbytes
            self._bytes_out += nbytes
            self._peak = max(self._peak, self._bytes)
            self._leaving.append(weakref.ref(kept))
        else:
            self._stayed += nbytes
        self._order.add(kept)
        key = storage_id(storage)
        self._known[key] = [*map(weakref.ref, self._kept_of(key)), weakref.ref(kept)]
        return kept

    def _let_go_of_what_has_left(self, new_bytes: int = 0) -> None:
        """Let go of memory on the device that has been copied.

        Without a budget no more than some of it is under way: streams wait. With one nothing waits.
        """
        most = math.inf if self._budget is not None else _LEAVING * self._largest
        under_way = sum(kept.nbytes for kept, _ in self._under_way())
        for kept, leaving in self._under_way():
            if not leaving.has_ended():
                if not new_bytes or under_way + new_bytes <= most:
                    return
                leaving.let_go()
            self._leaving.popleft()
            under_way -= kept.nbytes

    def _under_way(self) -> Iterator[tuple[Kept, Leaving]]:
        """Yield what leaves, the first one first; drop those that are gone."""
        for ref in list(self._leaving):
            kept = ref()
            leaving = None if kept is None else kept.leaving
            if kept is None or leaving is None or leaving.source is None:
                self._leaving.remove(ref)
            else:
                yield kept, leaving

    def _check_stream(self, tensor: Tensor) -> None:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "saved_tensors: the current stream is capturing a CUDA graph, expected forward"
                " outside of it; its copies would not be of the graph"
            )

    def _settle(self) -> None:
        while self._ended:
            ended = self._ended.popleft()
            if ended.was_away:
                self._bytes -= ended.nbytes
            else:
                self._order.add_room(ended.nbytes)
            if ended.storage in self._known and not any(self._kept_of(ended.storage)):
                del self._known[ended.storage]


def _owner_of(tensor: Tensor) -> Tensor:
    """Return the tensor that has the version counter: the one that this is a view of, or itself."""
    base = base_of(tensor)
    return tensor if base is None else base
