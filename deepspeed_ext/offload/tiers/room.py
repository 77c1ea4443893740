"""Which parameters' state rests on disk, and how much memory the ring by which it comes takes."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.io import TensorStore
from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.offload.host_tensors import host_bytes
from deepspeed_ext.offload.param_table import ParamTable
from deepspeed_ext.offload.tiers.disk_state import DiskState, shape_of, unit_of
from deepspeed_ext.ops.optimizers.state_formats import BLOCK
from deepspeed_ext.optim.buckets import Bucket

LEAST_SLAB, LARGEST_SLAB = 256 << 10, 64 << 20  # bytes of a piece
LEAST_SLABS, MOST_SLABS = 3, 16  # one is read, one stepped, one written
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "B": 1}
Dtypes = dict[str, torch.dtype]


def bytes_in(name: str, text: int | str | None) -> int | None:
    """Return a number of bytes, which may be given as text such as "2GiB".

    Args:
        name: of operation and argument, for the error.
        text: what was given.

    Raises:
        ValueError: it is neither.
    """
    if text is None or isinstance(text, int):
        return text
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit).strip()
        if number != text.strip():
            try:
                return int(float(number) * factor)
            except ValueError:
                break
    raise ValueError(f"{name} is {text!r}, expected bytes, as 2147483648 or '2GiB'")


@dataclass(frozen=True)
class RingRoom:
    """The memory of a ring.

    Attributes:
        slab_bytes: of a slab, which a piece of state has with its weights and gradients.
        slabs: how many.
    """

    slab_bytes: int
    slabs: int

    @property
    def nbytes(self) -> int:
        """All bytes of it."""
        return self.slab_bytes * self.slabs


def ring_room(
    name: str,
    budget: int,
    kinds: Sequence[tuple[Dtypes, torch.dtype]],
    gradients: int,
    counts: int,
) -> RingRoom:
    """Return how large a ring is.

    Args:
        name: of who asks, for errors.
        budget: bytes of host memory in all.
        kinds: of state that may rest on disk: dtypes by key, and the parameter's.
        gradients: bytes of those that are added up in host memory.
        counts: bytes of the numbers of steps.

    Raises:
        ValueError: the budget has no room for three slabs beside these.
    """
    least = LEAST_SLAB
    for dtypes, dtype in kinds:
        unit = unit_of(dtypes)
        record = shape_of(dtypes, 0, 0, unit).nbytes
        least = max(least, whole_pages(record + unit * (dtype.itemsize + 4)))
    needed = LEAST_SLABS * least + gradients + counts
    if needed > budget:
        summed = f", and {gradients} of gradients, which free_grads=True adds up in host memory"
        raise ValueError(
            f"{name}: memory_budget is {budget}, expected at least {needed} for three pieces of"
            " state: one that is read, one that is stepped, one that is written"
            f"{summed if gradients else ''}"
        )
    budget -= gradients
    slab = whole_pages(max(least, min(LARGEST_SLAB, budget // 16)))
    return RingRoom(slab, max(LEAST_SLABS, min(MOST_SLABS, budget // 2 // slab)))


def gradient_bytes(param: Tensor) -> int:
    """Return what the gradient of a parameter takes that is added up in host memory."""
    return 4 * local(param).numel()


def resident_bytes(param: Tensor, dtypes: Dtypes) -> int:
    """Return what weights and state take at the most that stay in host memory."""
    part = local(param)
    elements = -(-part.numel() // BLOCK) * BLOCK
    state = sum(elements * dtype.itemsize for dtype in dtypes.values())
    scales = sum(4 * elements // BLOCK for dtype in dtypes.values() if dtype == torch.uint8)
    return host_bytes([part]) + state + scales


def check_nvme(name: str, device: str, path: object, fraction: float | None) -> None:
    """Raise ValueError if options that say where state rests do not fit together."""
    if device not in ("cpu", "nvme"):
        raise ValueError(f"{name}: device is {device!r}, expected 'cpu' or 'nvme'")
    if device == "nvme" and path is None:
        raise ValueError(f"{name}: nvme_path is None, expected a folder with device='nvme'")
    if device == "cpu" and (path is not None or fraction is not None):
        given = "nvme_path" if path is not None else "nvme_fraction"
        raise ValueError(f"{name}: {given} is given, expected device='nvme' with it")
    if fraction is not None and not 0 <= fraction <= 1:
        raise ValueError(f"{name}: nvme_fraction is {fraction}, expected 0 to 1")


def store_for(name: str, path: Any, nbytes: int) -> TensorStore:
    """Return a scratch store with room for so many bytes.

    Raises:
        OSError: there is no such folder, it takes no file, or there is not so much room.
    """
    try:
        store = TensorStore(path)
    except OSError as error:
        why = f"{name}: nvme_path is {path}, expected a folder to write in: {error.strerror}"
        raise OSError(error.errno, why) from error
    try:
        reserve(name, store, nbytes)
    except OSError:
        store.close()
        raise
    return store


def reserve(name: str, store: TensorStore, nbytes: int) -> None:
    """Have room in a store for so many bytes that are yet to be written.

    Raises:
        OSError: there is not so much.
    """
    try:
        store.reserve(nbytes)
    except OSError as error:
        why = f"{name}: nvme_path is {store.path} with too little room: {error.strerror}"
        raise OSError(error.errno, why) from error


def maker(table: ParamTable[Any], store: TensorStore, room: RingRoom) -> Callable[..., Bucket]:
    """Return what makes a bucket, by where the state of its parameters is to be.

    A class has it, which is garbage long after the table could go.
    """
    known = weakref.WeakSet[DiskState]()
    return partial(_made, weakref.ref(table), weakref.ref(store), room.slab_bytes, known)


def _made(
    table: "weakref.ref[ParamTable[Any]]",
    store: "weakref.ref[TensorStore]",
    slab_bytes: int,
    states: "weakref.WeakSet[DiskState]",
    params: list[Tensor],
    *others: Any,
) -> Bucket:
    known, disk = table(), store()
    assert known is not None and disk is not None  # an optimizer has both
    if not known.of_copy(params[0]).is_on_disk:
        return Bucket(params, *others)
    made = DiskState(known.param_of, disk, slab_bytes, params, *others)
    # Now, while nothing has changed: in the middle of a step it would be too late.
    reserve("OffloadOptimizer", disk, sum(s.unwritten_bytes for s in (made, *states)))
    states.add(made)
    return made
