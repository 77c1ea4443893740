"""State validation: what values of loaded state must be, or a step would destroy."""

import math
from collections.abc import Container

import torch
from torch import Tensor

from deepspeed_ext.optim.buckets import STEP, Bucket
from deepspeed_ext.optim.checks import COUNT, title_of_state
from deepspeed_ext.optim.formats import MASTER, REMAINDER, SCALE
from deepspeed_ext.optim.owner import Owner


class StateValidation:
    """Checks of loaded values: queued for whole flat buffers, and read by the host all at once.

    Args:
        signed: keys of state that may be negative.
    """

    def __init__(self, signed: Container[str]) -> None:
        self._signed = signed
        self._verdicts: list[Tensor] = []
        self._subjects: list[tuple[str, Bucket | Tensor, Tensor]] = []

    def look_at(self, bucket: Bucket) -> None:
        """Queue the checks of what is in the flat buffers of a bucket."""
        for key, [buffer] in bucket.buffers.items():
            if key == STEP or self._is_unsigned(key, buffer):
                self._queue(key, bucket, buffer)
        for key, scales in bucket.scales.items():
            self._queue(key + SCALE, bucket, scales)

    def look_at_source(self, key: str, param: Tensor, value: Tensor) -> None:
        """Queue the check of state that no flat buffer takes as it is.

        Args:
            key: which state of the parameter; or, of its scales, with their ending.
            param: the parameter.
            value: what this process has been given of it.
        """
        if key.endswith(SCALE) or key == REMAINDER or self._is_unsigned(key, value):
            self._queue(key, param, value)

    def check(self, optimizer: Owner) -> None:
        """Wait for the devices, once each, and raise ValueError if some number must not be."""
        places: dict[torch.device, list[int]] = {}
        for place, verdict in enumerate(self._verdicts):
            places.setdefault(verdict.device, []).append(place)
        for there in places.values():
            found = torch.stack([self._verdicts[place] for place in there]).tolist()
            for place, fits in zip(there, found, strict=True):
                if not fits:
                    _refuse(optimizer, *self._subjects[place])

    def _is_unsigned(self, key: str, values: Tensor) -> bool:
        """Return whether these are floats that must not be negative."""
        may_be = key in self._signed or key in (MASTER, REMAINDER)
        return values.is_floating_point() and not may_be

    def _queue(self, key: str, whose: Bucket | Tensor, values: Tensor) -> None:
        if values.numel():
            self._verdicts.append(_fit(key, values))
            self._subjects.append((key, whose, values))


def _fit(key: str, values: Tensor) -> Tensor:
    """Return whether all of these may be in a state: bool, no dimension, without waiting."""
    if key == STEP:
        least, most = values.aminmax()  # both NaN if one value is
        return (least >= 0) & (most < torch.inf)
    if key == REMAINDER:
        least, most = values.aminmax()
        return (least >= -(2**15)) & (most < 2**15)
    if key.endswith(SCALE):
        return _are_powers(values).all()
    return values.min() >= 0


def _are_powers(scales: Tensor) -> Tensor:
    """Return for each scale whether it is 0 or a power of two."""
    bits = scales.float().view(torch.int32)
    return (bits & ~0x7F800000 == 0) & (bits != 0x7F800000)


def _refuse(optimizer: Owner, key: str, whose: Bucket | Tensor, values: Tensor) -> None:
    """Raise ValueError for the first parameter with such a number."""
    if isinstance(whose, Bucket):
        for i, param in enumerate(whose.params):
            part = whose.views(i)[key]
            if part.numel() and not _fit(key, part):
                _refuse(optimizer, key, param, part)
    assert isinstance(whose, Tensor)
    bad, want = values.min(), "none below 0"
    if key == STEP:
        want = COUNT
    elif key == REMAINDER:
        bad, want = values.abs().max(), "16 bits"
    elif key.endswith(SCALE):
        bad, want = values[~_are_powers(values)][0], "0 or a power of two"
    title, number = title_of_state(optimizer, whose), bad.item()
    hint = ""
    if key != STEP and not math.isfinite(number):
        hint = "; it was so when it was saved: load an earlier one"
    raise ValueError(f"{title}: {key} has the value {number:g}, expected {want}{hint}")
