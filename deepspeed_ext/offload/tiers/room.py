"""Which parameters' state rests on disk, and how much memory the ring by which it comes takes."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from deepspeed_ext.dtensors import largest_part
from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.offload.host_tensors import host_bytes
from deepspeed_ext.offload.streamed import home_of
from deepspeed_ext.offload.tiers.disk_state import shape_of, unit_of
from deepspeed_ext.ops.optimizers.state_formats import BLOCK

LEAST_SLAB, LARGEST_SLAB = 256 << 10, 64 << 20  # bytes of a piece
LEAST_SLABS, MOST_SLABS = 3, 16  # one is read, one stepped, one written
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "B": 1}
_MOST_BYTES = 1 << 62  # a number; what is as large, inf or NaN is a slip
Dtypes = dict[str, torch.dtype]


def bytes_in(name: str, text: float | str | None) -> int | None:
    """Return a number of bytes, which may be given as text such as "2GiB".

    Args:
        name: of operation and argument, for the error.
        text: what was given.

    Raises:
        ValueError: it is neither, or negative, or no whole number.
    """
    if text is None:
        return None
    number = _in_units(text) if isinstance(text, str) else text
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if is_number and 0 <= number < _MOST_BYTES:
        whole = int(number)
        if isinstance(text, str) or whole == number:
            return whole
    raise ValueError(f"{name} is {text!r}, expected bytes, as 2147483648 or '2GiB'")


def _in_units(text: str) -> float:
    """Return the number of bytes that a text such as "2GiB" says, or NaN."""
    for unit, factor in _UNITS.items():
        digits = text.removesuffix(unit).strip()
        if digits != text.strip():
            with suppress(ValueError):
                return float(digits) * factor
            break
    return math.nan


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

    def for_no_more_than(self, nbytes: int) -> "RingRoom":
        """Return as many slabs of it as so many bytes can fill, but enough for any step."""
        filled = -(-nbytes // self.slab_bytes)
        return replace(self, slabs=min(self.slabs, max(LEAST_SLABS, filled)))


def ring_room(
    name: str,
    budget: int,
    kinds: Sequence[tuple[Dtypes, torch.dtype]],
    gradients: int,
    beside: int,
) -> RingRoom:
    """Return how large a ring is.

    Args:
        name: of who asks, for errors.
        budget: bytes of host memory in all.
        kinds: of state that may rest on disk: dtypes by key, and the parameter's.
        gradients: bytes of those that are added up in host memory.
        beside: bytes of what else is in host memory in any case.

    Raises:
        ValueError: the budget has no room for three slabs beside these.
    """
    least = LEAST_SLAB
    for dtypes, dtype in kinds:
        unit = unit_of(dtypes)
        record = shape_of(dtypes, 0, 0, unit).nbytes
        least = max(least, whole_pages(record + unit * (dtype.itemsize + 4)))
    needed = LEAST_SLABS * least + gradients + beside
    if needed > budget:
        summed = f", and {gradients} of gradients, which free_grads=True adds up in host memory"
        raise ValueError(
            f"{name}: memory_budget is {budget}, expected at least {needed} for three pieces of"
            " state: one that is read, one that is stepped, one that is written"
            f"{summed if gradients else ''}"
        )
    budget -= gradients + beside
    slab = whole_pages(max(least, min(LARGEST_SLAB, budget // 24)))
    return RingRoom(slab, max(LEAST_SLABS, min(MOST_SLABS, 2 * budget // 3 // slab)))


def gradient_bytes(param: Tensor, is_summed: bool) -> int:
    """Return what the gradient of a parameter takes in host memory: on its way there, or summed."""
    return largest_part(param) * (sum_width(param) if is_summed else param.dtype.itemsize)


def sum_width(param: Tensor) -> int:
    """Return the bytes of an element of gradients that have left the device.

    Those of a streamed parameter are in its dtype, as long as there is one micro-step in a step.
    """
    return 4 if home_of(param) is None else param.dtype.itemsize


def resident_bytes(param: Tensor, dtypes: Dtypes) -> int:
    """Return what weights and state take at the most that stay in host memory."""
    count = largest_part(param)  # so that all processes come to one answer
    elements = -(-count // BLOCK) * BLOCK
    state = sum(elements * dtype.itemsize for dtype in dtypes.values())
    scales = sum(4 * elements // BLOCK for dtype in dtypes.values() if dtype == torch.uint8)
    weights = 0
    if home_of(param) is None:  # else they are there already
        weights = host_bytes([torch.empty(count, dtype=param.dtype, device="meta")])
    return weights + state + scales
