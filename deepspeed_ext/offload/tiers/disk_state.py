"""The state of some parameters on disk: pieces of it are records of a store, shown as memory."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.io.extents import PAGE
from deepspeed_ext.offload.host_tensors import put
from deepspeed_ext.offload.seals import parts_of
from deepspeed_ext.offload.tiers.records import Records
from deepspeed_ext.ops.optimizers.state_formats import BLOCK
from deepspeed_ext.optim.buckets import STEP, Bucket, LookAt, Zeros, follow
from deepspeed_ext.optim.formats import MASTER, REMAINDER, SCALE
from deepspeed_ext.torch_internals.tensors import version_of


class Part(NamedTuple):
    """Where a state key lies in the record of a piece.

    Attributes:
        dtype: of its values.
        per: elements of parameters for which there is one value.
        begin: the first byte in the record.
        nbytes: of a whole piece, in whole pages.
    """

    dtype: torch.dtype
    per: int
    begin: int
    nbytes: int


class Shape(NamedTuple):
    """How the state of a bucket is cut.

    Attributes:
        elements: of parameters, for which there is state in a piece.
        parts: of a record, by state key, one behind the other.
    """

    elements: int
    parts: dict[str, Part]

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return sum(part.nbytes for part in self.parts.values())


def shape_of(
    dtypes: Mapping[str, torch.dtype], most_bytes: int, beside: int, elements: int
) -> Shape:
    """Return how state is cut into pieces of whole pages for each key.

    Args:
        dtypes: of the state keys.
        most_bytes: of a piece, if so many are enough for the least one.
        beside: bytes for each element that lie in the same memory.
        elements: of all of it.
    """
    values = {key: (dtype, 1) for key, dtype in dtypes.items()}
    coded = [key for key, dtype in dtypes.items() if dtype == torch.uint8]
    values |= {key + SCALE: (torch.float32, BLOCK) for key in coded}
    unit = unit_of(dtypes)
    bytes_of_unit = sum(unit // per * dtype.itemsize for dtype, per in values.values())
    most_units = -(-max(elements, 1) // unit)
    units = min(most_units, max(1, most_bytes // max(1, bytes_of_unit + beside * unit)))
    elements, parts, begin = units * unit, {}, 0
    for key, (dtype, per) in values.items():
        parts[key] = Part(dtype, per, begin, elements // per * dtype.itemsize)
        begin += parts[key].nbytes
    return Shape(elements, parts)


def unit_of(dtypes: Mapping[str, torch.dtype]) -> int:
    """Return of how many elements, or of a multiple, each key has whole pages."""
    return BLOCK * PAGE // 4 if torch.uint8 in dtypes.values() else PAGE


class Shown:
    """Flat memory for each part of a record, in which pieces of state are shown where they lie.

    Args:
        elements: for which there is state.
        shape: how it is cut.
        records: has the pieces.

    Attributes:
        flats: tensors by key, and by key with `_scale` of the scales of codes; zeros at first.
    """

    def __init__(self, elements: int, shape: Shape, records: Records) -> None:
        self.elements, self.shape, self._records = elements, shape, records
        self.maps, self.flats = {}, {}
        for key, part in shape.parts.items():
            self.maps[key], memory = records.file_map(elements // part.per * part.dtype.itemsize)
            self.flats[key] = memory.view(part.dtype)

    def elements_of(self, k: int) -> int:
        """Return of how many elements a piece has the state."""
        return min(self.shape.elements, self.elements - k * self.shape.elements)

    def show(self, k: int, name: str) -> None:
        """Show a piece as the record of a name has it, and drop what was written to it."""
        for key, part in self.shape.parts.items():
            nbytes = self.elements_of(k) // part.per * part.dtype.itemsize
            if nbytes:
                view, begin = self.maps[key], k * part.nbytes
                self._records.store.show(name, view, begin, nbytes, part.begin)


class DiskState(Bucket):
    """Parameters and their state as a Bucket has it, in flat buffers that show what is on disk.

    What is written to these buffers is not on disk yet: `flush` brings it there. The parameters
    are host copies without memory; who needs their values gets them for as long as he does.

    Args:
        owner_of: the parameter that a copy is of.
        records: has them.
        piece_bytes: most bytes of a piece, with weights and gradients of it.
        others: see Bucket.

    Attributes:
        shape: how it is cut.
        on_disk: for each piece whether there is a record of it; else it is zeros.
        exposed: pieces that somebody may have written to in the buffers, since they were put.
        stale: parameters that were written since their master weights were.
    """

    def __init__(
        self,
        owner_of: Callable[[Tensor], Tensor],
        records: Records,
        piece_bytes: int,
        params: list[Tensor],
        dtypes: Mapping[str, torch.dtype],
        signed: Container[str],
        noise_keys: Sequence[int] | None,
        may_move: bool,
        make: Zeros,
    ) -> None:
        super().__init__(params, dtypes, signed, noise_keys, may_move, _nothing)
        self._owner_of, self.records = owner_of, records
        largest = max(part.dtype.itemsize for part in self.parts())
        self.is_small = False  # it is not worth the way to the disk to merge it with others
        self.shape = shape_of(dtypes, piece_bytes, largest + 4, self.elements)
        needed = self.shape.nbytes + (largest + 4) * min(self.shape.elements, self.elements)
        if needed > piece_bytes:
            raise ValueError(
                f"OffloadOptimizer: a piece of state has {needed} bytes, expected at most"
                f" {piece_bytes}, as the ring has for those that were there when it was made; make"
                " the optimizer with all groups"
            )
        self.count = max(1, -(-self.elements // self.shape.elements))
        self.on_disk = [False] * self.count
        self.exposed: set[int] = set()
        self.stale: set[int] = set()
        self.buffers = {STEP: [make(len(params), torch.float32, self.device)]}
        self._filled: set[int] = set()  # pieces that were written to, and are to be flushed
        self._names = [f"{records.serial()}.{k}.0" for k in range(self.count)]
        records.hold(self._names)
        self._shown = Shown(self.elements, self.shape, records)
        let_go = _LetGo(records, self._names, len(self._shown.maps))
        for shown in self._shown.maps.values():
            weakref.finalize(shown, let_go).atexit = False
        for key, flat in self._shown.flats.items():
            if key in dtypes:
                self.buffers[key] = [flat]
            else:
                self.scales[key.removesuffix(SCALE)] = flat

    @property
    def names(self) -> list[str | None]:
        """The names of records, by piece; None where there are zeros."""
        both = zip(self._names, self.on_disk, strict=True)
        return [name if is_there else None for name, is_there in both]

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of the records that there will be, and are not yet."""
        return self.on_disk.count(False) * self.shape.nbytes

    def name(self, k: int) -> str:
        """Return the name of the record of a piece."""
        return self._names[k]

    def begin_put(self, k: int) -> str:
        """Return the name to put a piece under: not the one by which a commit knows it."""
        name = self._names[k]
        if self.records.is_shared(name):
            begin, _, turn = name.rpartition(".")
            self._names[k] = f"{begin}.{1 - int(turn)}"
            self.records.hold([self._names[k]])
            self.records.release([name])
        return self._names[k]

    def values(self, k: int, record: Tensor) -> dict[str, Tensor]:
        """Return the state in the record of a piece, flat, by its keys."""
        n = self.elements_of(k)
        found = {}
        for key, part in self.shape.parts.items():
            nbytes = n // part.per * part.dtype.itemsize
            found[key] = record[part.begin : part.begin + nbytes].view(part.dtype)
        return found

    def elements_of(self, k: int) -> int:
        """Return of how many elements a piece has the state."""
        return self._shown.elements_of(k)

    def copy_shown(self, k: int, record: Tensor) -> None:
        """Copy what the buffers show of a piece to a record."""
        for key, value in self.values(k, record).items():
            begin = k * self.shape.elements // self.shape.parts[key].per
            value.copy_(self._shown.flats[key][begin : begin + value.numel()])

    def show(self, k: int) -> None:
        """Let the buffers show the record of a piece, which was put."""
        self.on_disk[k] = True
        self.exposed.discard(k)
        self._shown.show(k, self.name(k))

    def expose(self) -> None:
        """Take all pieces for written to, as somebody may have in the buffers."""
        self.exposed = set(range(self.count))

    def flush(self, pieces: Iterable[int]) -> None:
        """Bring what was written to the buffers to the disk."""
        record = torch.zeros(self.shape.nbytes, dtype=torch.uint8, device="cpu")
        for k in pieces:
            self.copy_shown(k, record)
            self.records.put(self.begin_put(k), record).result()
            self.show(k)

    # Where a Bucket would read the weights

    @contextmanager
    def _weights_of(self, i: int) -> Iterator[None]:
        """Let a host copy be what its parameter is."""
        copy = self.params[i]
        bare = local(copy).detach()
        put(copy, parts_of([self._owner_of(copy)])[0].detach().cpu())
        try:
            yield
        finally:
            put(copy, bare)

    def fill(
        self, i: int, values: Mapping[str, Any], look_at_source: LookAt | None = None
    ) -> dict[str, Tensor]:
        """See Bucket.fill. What is whole behind it goes to the disk."""
        before = self._versions_of_state()
        with self._weights_of(i):
            shown = super().fill(i, values, look_at_source)
        is_last = i + 1 == len(self.params)
        end = self.elements if is_last else int(self.offsets[i + 1])
        if self._versions_of_state() != before:
            self._filled_to(int(self.offsets[i]), end)
        self._flush_filled(end if not is_last else self.count * self.shape.elements)
        return shown

    def _filled_to(self, begin: int, end: int) -> None:
        size = self.shape.elements
        self._filled |= set(range(begin // size, -(-end // size)))

    def _flush_filled(self, end: int) -> None:
        whole = {k for k in self._filled if (k + 1) * self.shape.elements <= end}
        self.flush(sorted(whole))
        self._filled -= whole

    def _versions_of_state(self) -> list[int]:
        return list(map(version_of, self._shown.flats.values()))

    def reset_master_weights(self) -> None:
        """See Bucket.reset_master_weights."""
        self.expose()  # until all of it is there
        if REMAINDER in self.buffers:
            self.buffers[REMAINDER][0].zero_()
        if MASTER in self.buffers:
            for i in range(len(self.params)):
                with self._weights_of(i):
                    self.views(i)[MASTER].copy_(local(self.params[i]))
        self.flush(range(self.count))

    def follow_stale(self) -> None:
        """Give master weights the values of parameters that were written, for who is shown them."""
        if MASTER in self.buffers:
            for i in self.stale:
                with self._weights_of(i):
                    follow(self.views(i)[MASTER], local(self.params[i]))
        self.stale.clear()

    def refresh_master_weights(self) -> None:
        """Do nothing: a step does it for each piece that it reads."""


def _nothing(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _LetGo:
    """Releases records when nobody sees any part of them any more.

    Users may hold tensors of state for longer than there is an optimizer.
    """

    def __init__(self, records: Records, names: list[str], views: int) -> None:
        self._records, self._names, self._views = records, names, views

    def __call__(self) -> None:
        self._views -= 1
        if not self._views:
            self._records.release(self._names)
